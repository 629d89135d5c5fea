"""Exchanges of simulated ranks: nothing is lost, and dense, complete and plain exchanges give the same training."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from devices import EmulatedDevice, cupy, emulated
from torch_ranks import Comm
from training import Given, conserved

from benchmarks.gpt2.exchanges import POWERSGD_START, Board, PowerSGD, exchange_for
from benchmarks.gpt2.model import build
from horovod_sparse.engine import layout
from horovod_sparse.transport.in_process import run_ranks

pytestmark = pytest.mark.full

RANKS, LR = 3, 0.5
COMPRESSIONS = [
    "dense",
    "topka:density=0.05,dense_below=0,indices=coded",
    "recommended:density=0.05,dense_below=0,fresh=0",
]


def steps_of(spec, steps=4, device=None, optimizer=torch.optim.AdamW, **settings):
    """Parameters of every rank after steps of the tiny model, each on its own tokens."""
    board = Board(RANKS)
    torch.manual_seed(0)
    model = build("tiny")
    replicas = [copy.deepcopy(model).to(device) for _ in range(RANKS)]

    def program(transport):
        replica = replicas[transport.rank]
        plain = optimizer(replica.parameters(), **{"lr": 1e-3, **settings})
        exchange = exchange_for(spec, replica, plain, transport, board)
        generator = torch.Generator().manual_seed(transport.rank)
        for _ in range(steps):
            tokens = torch.randint(256, (2, 65), generator=generator).to(device)
            plain.zero_grad()
            replica(tokens[:, :-1], tokens[:, 1:]).backward()
            plain.step()
        assert exchange.bytes_sent > 0
        return torch.cat([p.detach().cpu().flatten() for p in replica.parameters()])

    first, *others = run_ranks(RANKS, program)
    assert all(torch.equal(first, other) for other in others)
    return first


def test_sent_in_full_without_momentum_is_dense_training_up_to_rounding():
    dense, complete, plain = map(steps_of, ("dense", "topka:density=1,indices=plain", "none"))
    sparse = steps_of("topka:density=0.01")
    assert torch.allclose(dense, plain, rtol=0, atol=1e-5)
    assert torch.allclose(complete, dense, rtol=0, atol=1e-5)
    assert not torch.allclose(sparse, dense, rtol=0, atol=1e-4)


@pytest.mark.parametrize("spec", COMPRESSIONS)
def test_every_gradient_is_in_the_parameters_or_in_a_residual(spec):
    def program(transport):
        comm, model, given = Comm(transport), Given(), 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        exchange = exchange_for(spec, model, optimizer, transport, Board(RANKS))
        for step in range(5):
            optimizer.zero_grad()
            model.loss(transport.rank, step).backward()
            optimizer.step()
            given += LR * model.total(transport.rank, step)
            if not conserved(comm, model, exchange, given):
                return False
        return model.moved() != 0

    assert run_ranks(RANKS, program) == [True] * RANKS


class Residuals:
    """The errors of PowerSGD in the form of the state of an exchange."""

    def __init__(self, exchange: PowerSGD) -> None:
        self.exchange = self
        self._power = exchange

    def state_dict(self):
        errors = self._power.state_dict()["errors"]
        return {"buckets": [{"unit": LR / RANKS, "memory": {"residual": error}} for error in errors]}


def test_powersgd_keeps_what_it_does_not_send():
    board = Board(RANKS)

    def program(transport):
        comm, model, given = Comm(transport), Given(), 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        exchange = exchange_for("powersgd:rank=1", model, optimizer, transport, board)
        law = []
        for step in range(POWERSGD_START + 5):
            optimizer.zero_grad()
            model.loss(transport.rank, step).backward()
            optimizer.step()
            given += LR * model.total(transport.rank, step)
            law.append(conserved(comm, model, Residuals(exchange), given, tolerance=1e-2))
        kept = Residuals(exchange).state_dict()["buckets"][0]["memory"]["residual"]
        return all(law) and kept.shape == (1, 7, 11) and bool(kept.abs().max() > 1)

    assert run_ranks(RANKS, program) == [True] * RANKS


def test_powersgd_of_full_rank_approximates_matrices_of_low_rank_exactly():
    """Two steps of the subspace iteration suffice for the sum of three matrices of rank 1."""
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(40, 1, generator=generator), torch.randn(1, 60, generator=generator)) for _ in range(RANKS)]
    mean = sum(left @ right for left, right in pairs) / RANKS
    board = Board(RANKS)

    def program(transport):
        matrix = torch.nn.Parameter(torch.zeros(40, 60))
        optimizer = torch.optim.SGD([matrix], lr=1.0)
        PowerSGD(optimizer, transport, board, rank=3)
        left, right = pairs[transport.rank]
        for _ in range(POWERSGD_START + 1):
            matrix.grad = left @ right
            before = matrix.detach().clone()
            optimizer.step()
        return bool(torch.allclose(before - matrix, mean, atol=1e-4))

    assert run_ranks(RANKS, program) == [True] * RANKS


@pytest.mark.parametrize("spec", ["dense", "recommended:density=0.01"])
def test_a_step_on_a_device_has_the_bits_of_the_host(spec, monkeypatch):
    expected = steps_of(spec, steps=2)
    if not emulated():
        found = steps_of(spec, steps=2, device=torch.device("cuda", 0))
        assert torch.allclose(found, expected, rtol=0, atol=1e-3)  # its own forward pass is rounded differently
        return
    pretended, kernel = EmulatedDevice(), cupy.cuda.nvrtc._Kernel
    launch, lock = kernel.__call__, threading.Lock()

    def launch_alone(*arguments, **named):  # the emulation runs one kernel at a time
        with lock:
            launch(*arguments, **named)

    monkeypatch.setattr(kernel, "__call__", launch_alone)
    monkeypatch.setattr(layout, "device_of", lambda _: pretended)
    assert torch.equal(steps_of(spec, steps=2), expected)
    assert pretended.calls["follow"]
