"""A step launches no kernel that CuPy would first have to compile, which takes it about two seconds each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
import pytest
import torch
from devices import EmulatedDevice, on_device
from jit_kernels import Variant, compiled
from laws import everywhere

from horovod_sparse.config import parse
from horovod_sparse.engine import layout
from horovod_sparse.engine.bucket import Bucket, Settings
from horovod_sparse.engine.layout import Member, plan
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.worker import Worker
from horovod_sparse.kernels import to_host
from horovod_sparse.rules import Conditions

SHAPES = [(40, 30), (1,), (3, 5, 7), (2000,), (90,)]
# What the default chooses from, the other collectives of top-k, and what they send.
NONE = [
    "recommended:density=0.05,collective=topka",
    "recommended:density=0.05,collective=oktopk",
    "dense",
    "topka:density=0.05,indices=coded",
    "topka:density=0.05,indices=plain,wire=float16",
]
MORE = [
    *("gtopk:density=0.05", "topkdsa:density=0.05", "hierarchical:density=0.05,node_ranks=2", "dense:wire=log4"),
    *("topka:density=0.05,wire=bfloat16", "topka:density=0.05,wire=log8", "dense:wire=float16"),
]
# The smallest magnitude of a selection, at steps that renew the threshold.
FEW = {"oktopk:density=0.05": {"absolute", "min"}}


@contextmanager
def there() -> Iterator[None]:
    """Treat tensors of the CPU as device tensors during the block."""
    device = EmulatedDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "device_of", lambda _: device)
        yield


def train(transport: Any, configuration: str, steps: int = 3) -> set[Variant]:
    """Return what the first steps of a bucket compile, including its construction."""
    with there(), compiled() as found:
        members = [Member.of(str(i), torch.zeros(shape), group=0) for i, shape in enumerate(SHAPES)]
        settings = Settings(parse(configuration), 1 / transport.size, undoable=True)
        worker = Worker(lambda _: Reading(Conditions(0.1, epoch=0)), undoable=True)
        worker.needs_confirmation = True
        worker.add([Bucket(one, settings, transport) for one in plan(members, bucket_bytes=1 << 20)])
        for step in range(steps):
            generator = torch.Generator().manual_seed(step + 10 * transport.rank)
            for key, shape in enumerate(SHAPES):
                worker.put(str(key), torch.randn(shape, generator=generator))
            worker.wait_for_results()
            worker.finish()
            worker.confirm()
    return found


@pytest.mark.mpi
@pytest.mark.parametrize(
    "configuration",
    [
        *NONE,
        *(pytest.param(one, marks=pytest.mark.full) for one in [*MORE, *FEW]),
        pytest.param("recommended:density=0.05", marks=pytest.mark.nightly),  # measures the network, too
    ],
)
def test_kernels_that_cupy_compiles_in_the_first_steps(transport: Any, configuration: str) -> None:
    found = train(transport, configuration)
    unexpected = [one for one in found if one.operation not in FEW.get(configuration, set())]
    assert everywhere(transport, not unexpected), unexpected


def test_kernels_are_noticed() -> None:
    x = on_device(np.arange(8, dtype=np.float32))
    strided = x[::2]
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: x + 1, "add"),
        (lambda: x.copy(), "copy"),
        (lambda: x.astype(np.float64), "astype"),
        (lambda: x[on_device(np.arange(3))], "[indices]"),
        (lambda: x[on_device(np.arange(8) < 3)], "[mask]"),
        (lambda: x.__setitem__(slice(0, 4), strided), "[slice] ="),
        (lambda: x.__setitem__(slice(0, 4), 1), "[slice] ="),
        (lambda: np.concatenate([x, x]), "concatenate"),
        (lambda: np.arange(3, like=x), "arange"),
        (lambda: np.flatnonzero(x), "flatnonzero"),
        (lambda: x.fill(2), "fill"),
        (lambda: x.any(), "any"),
    ]
    for run, operation in cases:
        with compiled() as found:
            run()
        assert operation in {one.operation for one in found}, operation


def test_copies_of_memory_are_no_kernels() -> None:
    x = on_device(np.arange(8, dtype=np.float32))
    with compiled() as found:
        x[:4] = x[4:]
        x[2:] = 0
        x.fill(0)
        x.view(np.uint8)[:4] = on_device(np.ones(4, np.uint8))
        cupy.zeros(5, np.float32)
        to_host(x.reshape(2, 4))
    assert not found
