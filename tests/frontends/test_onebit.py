"""Signs of the optimizer's momentum: Adam's second moment is that of the dense steps before."""

from __future__ import annotations

import pytest
import torch
from laws import everywhere
from states import same
from training import Given, agree, mlp, sgd, snapshot, train, wrap

import horovod_sparse as hvs

pytestmark = pytest.mark.mpi

WARM = 6


def signs(dense_steps=WARM, **settings):
    return hvs.Compression.onebit(memory="momentum", dense_steps=dense_steps, dense_below=0, **settings)


def adam(model, **settings):
    return torch.optim.Adam(model.parameters(), **{"lr": 0.01, "betas": (0.8, 0.99), **settings})


def adamw(model, **settings):
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "betas": (0.8, 0.99), **settings})


def delivered(optimizer, p):
    """What the exchange has delivered last, as a mean over the ranks."""
    part = optimizer.exchange.delivered_of[p]
    assert part.handover.held.indices is None
    return part.unit * part.part(part.handover.held).view(p.shape)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (adamw, {"weight_decay": 0.0}),
        pytest.param(adam, {"weight_decay": 0.1, "maximize": True}, marks=pytest.mark.full),
        pytest.param(adam, {"amsgrad": True, "foreach": True}, marks=pytest.mark.full),
    ],
)
def test_the_second_moment_stays_that_of_the_dense_steps(hvd, comm, make, settings):
    model, rank, ranks = Given(torch.float64), comm.Get_rank(), comm.Get_size()
    optimizer, plain = wrap(model, signs(), make(model, **settings)), Given(torch.float64)
    of_torch = make(plain, **settings)
    train(optimizer, model, rank, range(WARM), Given.loss)
    for step in range(WARM):
        for number, p in enumerate(plain.parameters()):
            p.grad = sum(plain.gradients(one, step)[number] for one in range(ranks)) / ranks
        of_torch.step()
    assert everywhere(comm, all(map(torch.allclose, model.parameters(), plain.parameters())))
    if ranks == 1:
        return  # nothing is exchanged
    (_, beta), sign, decay = (0.8, 0.99), -1 if settings.get("maximize") else 1, settings.get("weight_decay", 0.0)
    frozen = [optimizer.state[p]["exp_avg_sq"] / (1 - beta**WARM) for p in model.parameters()]
    rests = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    for step in range(WARM, WARM + 40):
        before = snapshot(model)
        train(optimizer, model, rank, [step], Given.loss)
        for p, second, rest, old in zip(model.parameters(), frozen, rests, before, strict=True):
            state = optimizer.state[p]
            assert torch.allclose(state["exp_avg_sq"] / (1 - beta ** (step + 1)), second, rtol=1e-9)
            if make is adam and decay:
                rest.add_(0.2 / 0.8 * decay * old)  # the decay has a momentum of its own
            rest *= 0.8
            assert torch.allclose(state["exp_avg"], rest + sign * delivered(optimizer, p), atol=1e-9)
            update = 0.01 * (state["exp_avg"] / (1 - 0.8 ** (step + 1))) / (second.sqrt() + 1e-8)
            assert torch.allclose(old - p.detach(), update, atol=1e-7)
    assert agree(comm, snapshot(model))


def test_an_entry_without_a_second_moment_moves_by_no_more_than_the_learning_rate(hvd, comm):
    """Signs move entries whose gradient is zero, too; divided by eps alone, they would go far."""
    model, rank = Given(torch.float64), comm.Get_rank()
    optimizer = wrap(model, signs(), adam(model))

    def loss(model, rank, step):
        return (model.first[:150] * model.gradients(rank, step)[0][:150]).sum() + 0 * model.first.sum()

    for step in range(WARM + 30):
        before = snapshot(model)[0]
        train(optimizer, model, rank, [step], loss)
        assert everywhere(comm, (snapshot(model)[0] - before)[150:].abs().max() < 0.1)


@pytest.mark.parametrize("make", [adam, adamw])
def test_without_dense_steps_adam_is_refused_with_the_remedy(hvd, comm, make):
    with pytest.raises(ValueError, match=r"dense_steps must be at least 1, not 0, .* Adam.*as in onebit:"):
        wrap(model := mlp(), signs(dense_steps=0), make(model))
    wrap(model := mlp(), signs(dense_steps=0), sgd(model))


def test_a_first_beta_of_zero_is_refused_once_signs_are_sent(hvd, comm):
    model, rank = Given(torch.float64), comm.Get_rank()
    optimizer = wrap(model, signs(), adam(model, betas=(0.0, 0.99)))
    train(optimizer, model, rank, range(WARM), Given.loss)
    if comm.Get_size() > 1:
        with pytest.raises(ValueError, match=r"first of betas must be above 0, not 0.0, .*memory='residual'"):
            train(optimizer, model, rank, [WARM], Given.loss)


def test_a_state_with_signs_continues_with_the_same_bits(hvd, comm):
    results = []
    for resumed in (False, True):
        model, rank = Given(torch.float64), comm.Get_rank()
        optimizer = wrap(model, signs(), adam(model))
        train(optimizer, model, rank, range(WARM + 5), Given.loss)
        if resumed:
            states = snapshot(model), optimizer.state_dict(), optimizer.compression_state_dict()
            model = Given(torch.float64)
            optimizer = wrap(model, signs(), adam(model))
            with torch.no_grad():
                for p, value in zip(model.parameters(), states[0], strict=True):
                    p.copy_(value)
            optimizer.load_state_dict(states[1])
            optimizer.load_compression_state_dict(states[2])
        train(optimizer, model, rank, range(WARM + 5, WARM + 10), Given.loss)
        results.append(snapshot(model))
    assert everywhere(comm, same(*results))
