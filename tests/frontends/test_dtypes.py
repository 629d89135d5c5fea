"""Models of any dtypes, also under other defaults of torch: as stock DDP where everything is sent."""

from __future__ import annotations

import pytest
import torch
from front_ends import start
from laws import everywhere
from sharding import full
from states import same
from torch import nn
from torch.distributed.fsdp import FSDPModule
from training import agree, near, snapshot

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

FRONT_ENDS = ("Horovod", "local", "DDP", "FSDP")
COMPLEX, REAL = (torch.complex64, torch.complex128), (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Term(nn.Module):
    """A parameter and its part of the loss, whose gradient no other parameter changes."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 32, dtype=torch.float64, device="cpu").to(dtype).view(4, 8))

    def forward(self, x):
        factor = 1 + 2j if self.weight.is_complex() else 1
        return (factor * self.weight + x.to(self.weight.dtype)).abs().square().sum().double()


class Terms(nn.ModuleList):
    """Terms of a loss; the first one may be of rank 0 alone."""

    def __init__(self, *dtypes, unused=False):
        super().__init__(Term(dtype) for dtype in dtypes)
        self.unused = unused

    def forward(self, rank, step):
        x = torch.tensor(1.0 + rank + 0.1 * step, dtype=torch.float64, device="cpu")
        return sum(term(x) for term in list(self)[self.unused and rank > 0 :])


def trained(comm, front_end, dtypes, compression=None, make=None, steps=4):
    """Parameters after some steps."""
    make = make or (
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0 if front_end == "local" else 0.9)
    )
    started = start(front_end, Terms(*dtypes), make, compression)
    for step in range(steps):
        started.optimizer.zero_grad()
        started.model(comm.Get_rank(), step).backward()
        started.optimizer.step()
    return full(started.model) if isinstance(started.model, FSDPModule) else snapshot(started.model)


def reals(parameters):
    return [torch.view_as_real(p) if p.is_complex() else p for p in parameters]


SPECS = {
    "topka": "topka:dense_below=0",
    "recommended": "recommended:dense_below=0,collective=topka,wire=float32,fresh=None",
}
CASES = [
    (front_end, name) for front_end in FRONT_ENDS for name in SPECS if (front_end, name) != ("local", "recommended")
]


@pytest.mark.parametrize(("front_end", "name"), CASES)
def test_complex_parameters_are_averaged_as_in_stock(hvd, group, comm, front_end, name):
    """Of real parameters, that is so at density 1."""
    dtypes, momentum = (*COMPLEX, *REAL), 0 if front_end == "local" else 0.9
    expected = trained(comm, "stock", dtypes, make=lambda given: torch.optim.SGD(given, lr=0.01, momentum=momentum))
    everything = trained(comm, front_end, dtypes, hvs.parse(f"{SPECS[name]},density=1"))
    sparse = trained(comm, front_end, dtypes, hvs.parse(f"{SPECS[name]},density=0.05"))
    assert everywhere(comm, near(reals(everything), reals(expected), 2e-2))
    for ours in (everything, sparse):
        assert everywhere(comm, near(reals(ours)[: len(COMPLEX)], reals(expected)[: len(COMPLEX)], 1e-5))
        assert agree(comm, reals(ours))


@pytest.fixture
def set_defaults():
    """Set default dtype or device of this process until the end of the test."""
    dtype = torch.get_default_dtype()

    def set_(default):
        torch.set_default_dtype(default) if isinstance(default, torch.dtype) else torch.set_default_device(default)

    yield set_
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)


def restarted(comm, front_end, compression):
    """Parameters and state of a training in which momentum is cleared by a loaded state, and one term is not used."""
    momentum = 0 if front_end == "local" else 0.9
    model = Terms(torch.float32, torch.float32, torch.float64, unused=front_end != "DDP")
    started = start(front_end, model, lambda given: torch.optim.SGD(given, lr=0.01, momentum=momentum), compression)
    initial = started.optimizer.state_dict()
    for step in range(4):
        if step == 2:
            started.optimizer.load_state_dict(initial)
        started.optimizer.zero_grad()
        started.model(comm.Get_rank(), step).backward()
        started.optimizer.step()
    return full(model) if isinstance(model, FSDPModule) else snapshot(model)


@pytest.mark.parametrize(("front_end", "name"), CASES)
@pytest.mark.parametrize(
    "default",
    [torch.float16, "meta", *[pytest.param(one, marks=pytest.mark.full) for one in (torch.bfloat16, torch.float64)]],
    ids=str,
)
def test_defaults_of_torch_change_no_bit(hvd, group, comm, set_defaults, default, front_end, name):
    compression = hvs.parse(f"{SPECS[name]},density=0.05")
    expected = restarted(comm, front_end, compression)
    set_defaults(default)
    assert everywhere(comm, same(restarted(comm, front_end, compression), expected))
