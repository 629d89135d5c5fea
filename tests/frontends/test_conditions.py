"""Conditions of a step: the optimizer's rate where it has one, and names that are used once."""

from __future__ import annotations

import pytest
import torch

from horovod_sparse.config import parse
from horovod_sparse.control.report import limits
from horovod_sparse.engine.exchange import Exchange
from horovod_sparse.engine.layout import Member
from horovod_sparse.frontends.exchange import GradientExchange
from horovod_sparse.transport.in_process import run_ranks


def conditions(group, *groups, spec="topka", kind=torch.optim.SGD):
    """Return the conditions of a param group, by its number, of an optimizer with these groups."""
    optimizer = kind([torch.zeros(1)], lr=0.1)
    optimizer.param_groups[:] = groups

    def program(transport):
        exchange = GradientExchange(
            parse(spec), transport, [optimizer], 1, limits(None, None), without_exchange="", between_steps=lambda: True
        )
        exchange.epoch, exchange.idle = 3, True
        return exchange.conditions(group)

    return run_ranks(1, program)[0]


@pytest.mark.parametrize(("group", "rate"), [(-1, 1.0), (0, 0.5), (1, 0.25), (2, 1.0), (3, 1.0)])
def test_a_group_without_a_rate_has_the_default(group, rate):
    """Adafactor's rate is None: it chooses its own."""
    step = conditions(group, {"lr": 0.5}, {"lr": torch.tensor(0.25)}, {"lr": None}, {})
    assert (step.learning_rate, step.epoch, step.idle) == (rate, 3, True)


@pytest.mark.parametrize(
    ("spec", "kind", "momentum", "after"),
    [
        ("topka", torch.optim.SGD, 0.9, True),
        ("topka", torch.optim.SGD, 0, False),
        ("topka:memory=momentum", torch.optim.SGD, 0.9, False),
        ("topka:memory=momentum", torch.optim.RMSprop, 0.9, True),  # whose momentum stays where it is
        ("topka:memory=momentum,momentum=0.9", torch.optim.SGD, 0, False),
    ],
)
def test_momentum_that_no_memory_applies_comes_after_the_exchange(spec, kind, momentum, after):
    group = {"lr": 0.5, "momentum": momentum, "nesterov": False, "dampening": 0, "params": []}
    assert conditions(0, group, spec=spec, kind=kind).momentum_after == after


def test_a_name_that_is_taken_is_refused_on_every_rank():
    def program(transport):
        exchange = Exchange(parse("topka"), transport, 0.5, limits(None, None))
        exchange.add([Member.of("1.0", torch.zeros(2000), -1)])
        with pytest.raises(ValueError, match=rf"rank {transport.rank}: two parameters have the name '1.0'"):
            exchange.add([Member.of("1.0", torch.zeros(2000), -1)])

    run_ranks(2, program)
