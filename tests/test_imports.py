"""Who may import what: kernels and collectives run on many ranks, and on machines without Horovod or torch."""

from __future__ import annotations

import launch
import pytest

CODE = """
import importlib, sys
for name in sys.argv[2].split():
    importlib.import_module(name)
loaded = {name.partition(".")[0] for name in sys.modules}
sys.exit(f"loaded {sorted(loaded & set(sys.argv[1].split()))}" if loaded & set(sys.argv[1].split()) else 0)
"""
PARTS = ("accumulator", "vector", "kernels", "memories", "sparsifiers", "collectives", "compression", "pipeline")


@pytest.mark.parametrize(
    ("names", "forbidden"),
    [
        ("horovod_sparse horovod_sparse.cli", "torch horovod mpi4py numpy"),
        ("horovod_sparse.kernels horovod_sparse.memories horovod_sparse.sparsifiers", "torch horovod mpi4py"),
        (" ".join(f"horovod_sparse.{part}" for part in PARTS), "torch horovod"),
    ],
    ids=["package", "kernels", "stages"],
)
def test_imports_stay_below_their_layer(names, forbidden):
    result = launch.python("-c", CODE, forbidden, names)
    assert result.returncode == 0, result.stderr
