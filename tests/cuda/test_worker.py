"""Buckets on the device, through worker, pipeline and collective: the same bits as on the host, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import pytest
import torch
from devices import EmulatedDevice, emulated
from laws import everywhere
from states import same

from horovod_sparse.config import parse
from horovod_sparse.engine import layout
from horovod_sparse.engine.bucket import Bucket, Settings
from horovod_sparse.engine.layout import Member, plan
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.worker import Worker
from horovod_sparse.rules import Conditions

pytestmark = pytest.mark.mpi

SHAPES = [(40, 30), (1,), (3, 5, 7), (2000,), (90,)]
# Every collective and schedule, and rules whose ranks agree on more than vectors; test_signatures.py has every rule.
# Coding is not left to measurements.
CONFIGURATIONS = [
    "topka:density=0.02,indices=coded",
    "topkdsa:density=0.1,sparsifier=redsync,indices=plain",
    "randomblock:density=0.05,wire=float16",
    "stable:density=0.1,block=16,refresh=2",
    "topka:density=0.05,sparsifier=dgc,memory=momentum,momentum=0.9,fresh=0.4,indices=coded",
    "gravac:cf_min=4,sparsifier=randomk,collective=shared,window=2,eps=0.1,cf_max=1e6",
    "oktopk:density=0.05,memory=momentum,momentum=0.5,max_norm=1.0,schedule=accordion,indices=plain",
    "oktopk:density=0.05,keep=2,tau_threshold=2,tau_partition=2,indices=coded",
    "randomblock:density=0.05,memory=improved,rows=3,saving=0.5",
]
MORE = [
    "dense",
    "randomk:density=0.05,memory=conef,saving=0.5,wire=bfloat16",
    "topka:density=0.05,sparsifier=gaussiank,memory=conef,compressor=quantize,bits=4,indices=plain",
    "topka:density=0.05,sparsifier=multilevel,memory=partial,beta=0.3,compressor=quantize,indices=coded",
    "hierarchical:density=0.02,node_ranks=2,indices=coded",
    "topka:density=0.05,sparsifier=chunked,chunk=64,decay=0.9,wire=fitted2,indices=coded",
    "union:density=0.05,sparsifier=sidco,indices=coded",
    "micro:density=0.05,wire=float16,indices=plain",
    "spardl:density=0.05,wire=bfloat16,indices=coded",
    "deft:density=0.05,indices=plain",
    "exdyna:density=0.05,blocks=16,memory=momentum,momentum=0.9,indices=coded",
    "topka:density=0.05,memory=improved,version=1,compressor=quantize,indices=plain",
    "topka:density=0.2,schedule=gravac,window=2,eps=0.5,cf_max=1e6,indices=coded",
    "oktopk:density=0.05,memory=improved,compressor=quantize,wire=bfloat16,indices=plain",
]


@contextmanager
def there() -> Iterator[torch.device]:
    """Provide the device of the parameters; without a GPU, CPU tensors count as device tensors during the block."""
    if not emulated():
        yield torch.device("cuda", 0)
        return
    pretended = EmulatedDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "device_of", lambda _: pretended)
        yield torch.device("cpu")


def start(
    transport: Any, configuration: str, device: torch.device, dtypes: list[torch.dtype], undoable: bool = False
) -> Worker:
    parameters = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(SHAPES, dtypes, strict=True)]
    layouts = plan([Member.of(str(i), p, group=0) for i, p in enumerate(parameters)], bucket_bytes=1 << 20)
    shared = Settings(parse(configuration), 1 / transport.size, undoable)
    buckets = [Bucket(layout, shared, transport) for layout in layouts]
    worker = Worker(lambda _: Reading(Conditions(0.1, epoch=0)), undoable)
    worker.needs_confirmation = undoable
    worker.add(buckets)
    return worker


def step(worker: Worker, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run one step; return the results."""
    devices = {key: bucket.layout.torch_device for bucket in worker.buckets for key in bucket.layout.keys}
    given = [gradient.to(devices[str(i)], copy=True) for i, gradient in enumerate(gradients)]
    for i, gradient in enumerate(given):
        worker.put(str(i), gradient, hold=i == 1)
    worker.wait_for_results()
    results = [gradient.cpu() for gradient in given]
    worker.finish()
    return results


def states(worker: Worker) -> list[dict[str, Any]]:
    return [bucket.state_dict() for bucket in worker.buckets]


@pytest.mark.parametrize(
    "configuration", [*CONFIGURATIONS, *(pytest.param(one, marks=pytest.mark.full) for one in MORE)]
)
def test_the_device_computes_what_the_host_does(transport: Any, configuration: str) -> None:
    dtypes = [torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64]
    generator = torch.Generator().manual_seed(transport.rank)
    host = start(transport, configuration, torch.device("cpu"), dtypes)
    with there() as device:
        ours = start(transport, configuration, device, dtypes)
    for _ in range(3):
        gradients = [
            torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)
        ]
        expected, state = step(host, gradients), states(host)
        with there():
            assert everywhere(transport, same(step(ours, gradients), expected))
            assert everywhere(transport, same(states(ours), state))
            for bucket, saved in zip(ours.buckets, state, strict=True):
                bucket.load_state_dict(saved)
    # Only the host gathers in slots, which are up to a third larger than what they hold while densities change.
    sent = [sum(bucket.pipeline.traffic.bytes_sent for bucket in worker.buckets) for worker in (ours, host)]
    assert sent[0] == pytest.approx(sent[1], rel=0.35)


@pytest.mark.parametrize("configuration", ["oktopk:density=0.05", "randomk:density=0.05,memory=conef,saving=0.5"])
def test_an_overflow_leaves_all_residuals_unchanged(transport: Any, configuration: str) -> None:
    """Every rank receives it, so that a GradScaler skips the step everywhere; the finite bucket is undone."""
    dtypes = [*[torch.float16] * 4, torch.float64]
    generator = torch.Generator().manual_seed(transport.rank)
    with there() as device:
        worker = start(transport, configuration, device, dtypes, undoable=True)
        gradients = [
            torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)
        ]
        step(worker, gradients)
        worker.confirm()
        before = states(worker)
        if transport.rank == transport.size - 1:
            gradients[3][17] = torch.inf
        results = step(worker, gradients)
        assert everywhere(transport, not torch.isfinite(results[3]).all())
        assert everywhere(transport, transport.size == 1 or not same(states(worker), before))
        worker.undo_if_undoable()
        assert everywhere(transport, same(states(worker), before))


@pytest.mark.parametrize(
    ("configuration", "most"),
    # Whether the gradients are finite, messages and sums; for an exact global threshold, four histograms. What arrived
    # is read up to its header first; lengths of coded indices are known when they have been coded. Only the stand-in
    # counts.
    [
        ("topka:density=0.02,indices=plain", 5),
        ("gtopk:density=0.02,indices=plain", 12),
        ("oktopk:density=0.02,indices=plain", 20),
        ("topka:density=0.02,indices=coded", 10),
        ("gtopk:density=0.02,indices=coded", 15),
        ("oktopk:density=0.02,indices=coded", 38),
    ],
)
def test_a_step_synchronizes_with_the_device_only_a_few_times(transport: Any, configuration: str, most: int) -> None:
    generator = torch.Generator().manual_seed(transport.rank)
    with there() as device:
        worker = start(transport, configuration, device, [torch.float32] * len(SHAPES))
        for _ in range(3):
            gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
            cupy.cuda.get_current_stream().synchronize()
            before = dict(getattr(cupy, "transfers", {}))
            step(worker, gradients)
            after = getattr(cupy, "transfers", {})
            waited = sum(after.values()) - sum(before.values())
            assert everywhere(transport, waited <= most), (configuration, waited)
    assert len(worker.buckets) == 1
