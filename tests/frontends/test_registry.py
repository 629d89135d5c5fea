"""A checkpoint finds the exchange of a model."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

import horovod_sparse as hvs
from horovod_sparse.frontends.registry import exchange_of

COMPRESSION = hvs.parse("topka:density=0.05")


@pytest.fixture
def model():
    return torch.nn.Linear(3, 2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_that_of_the_optimizer_comes_first(model):
    state = hvs.ddp.SparseState(COMPRESSION, sgd(model), model.named_parameters())
    wrapped = SimpleNamespace(merge=None)
    assert exchange_of(model, wrapped) is wrapped
    assert exchange_of(model, SimpleNamespace(exchange=wrapped)) is wrapped
    assert exchange_of(model, state) is state


def test_a_state_is_found_by_its_parameters(model):
    other = torch.nn.Linear(3, 2)
    state = hvs.ddp.SparseState(COMPRESSION, None, model.named_parameters())
    assert exchange_of(model, sgd(model)) is state
    assert exchange_of(torch.nn.Sequential(model, other), sgd(other)) is state
    assert exchange_of(other, sgd(other)) is None


def test_a_dense_model_has_none(model):
    assert exchange_of(model, sgd(model)) is None


def test_two_exchanges_of_one_model_are_refused(model):
    states = [hvs.ddp.SparseState(COMPRESSION, None, [pair]) for pair in model.named_parameters()]
    with pytest.raises(ValueError, match="2 exchanges serve the model"):
        exchange_of(model, sgd(model))
    assert exchange_of(model, states[1]) is states[1]


def test_an_unpickled_state_that_does_not_know_its_model_is_refused(model):
    state = hvs.ddp.SparseState(COMPRESSION, None, model.named_parameters())
    state = pickle.loads(pickle.dumps(state))  # noqa: S301 - our own
    with pytest.raises(ValueError, match="does not know its model yet: set its named_parameters"):
        exchange_of(model, sgd(model))
    assert exchange_of(model, state) is state
