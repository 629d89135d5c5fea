"""Where there is no GPU, a stand-in for CuPy takes its place (devices.py): the same tests run on it."""

from __future__ import annotations

import importlib.util

from devices import has_gpu

collect_ignore = []
if importlib.util.find_spec("horovod") is None:
    collect_ignore += ["test_optimizer.py"]
if not has_gpu():
    # These need a real device: its streams, its allocator, its graphs, NCCL.
    collect_ignore += ["test_on_gpu.py", "test_nccl.py"]
