"""Without a GPU, the same tests run on an emulation of CuPy (devices.py)."""

from __future__ import annotations

import importlib.util

from devices import has_gpu

collect_ignore = []
if importlib.util.find_spec("horovod") is None:
    collect_ignore += ["test_optimizer.py"]
if has_gpu():
    # These test the emulation, or patch what a GPU would really do.
    collect_ignore += ["test_calls.py", "test_current_device.py", "test_emulation.py", "test_jit.py"]
    collect_ignore += ["test_stream_order.py"]
else:
    # These need a real device: its streams, its allocator, its graphs, NCCL.
    collect_ignore += ["test_on_gpu.py", "test_nccl.py"]
