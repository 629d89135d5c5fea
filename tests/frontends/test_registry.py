"""A checkpoint finds the exchange of a model, or says what keeps it from that."""

from __future__ import annotations

import pickle

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
