"""Generators, buffers and user data load without executing code."""

from __future__ import annotations

import io
import os
import random
from collections import Counter, OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpointing import reseed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from horovod_sparse.checkpoint import CheckpointError
from horovod_sparse.checkpoint.manifest import SHARED, Manifest, shard
from horovod_sparse.checkpoint.shards import read_own, write
from horovod_sparse.checkpoint.state import buffers, generators, require_loadable, set_generators


def draw():
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()  # noqa: NPY002


def test_random_generators_resume():
    reseed(5)
    draw()
    state = reloaded(generators(nn.Linear(1, 1)))
    expected = draw()
    reseed(6)
    set_generators(state, nn.Linear(1, 1))
    assert draw() == expected


@pytest.mark.parametrize(("devices", "expected"), [([], "cuda"), (["cpu"], "cuda"), (["cpu", "cuda:3"], "cuda:3")])
def test_the_generator_of_the_models_gpu_resumes(monkeypatch, devices, expected):
    """Also where the script has left GPU 0 the current one."""
    states, asked = {}, []
    parameters = [SimpleNamespace(is_cuda=one != "cpu", device=one) for one in devices]
    model = SimpleNamespace(parameters=lambda: parameters)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: asked.append(device) or torch.ones(3))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state.tolist()}))
    set_generators(reloaded(generators(model)), model)
    assert asked == [expected]
    assert states == {expected: [1, 1, 1]}


def test_buffers_are_distinguished_from_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert buffers(model, model.state_dict()).keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


class Anything:
    pass


def reloaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Code:
    """Object that creates a folder when unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_loading_executes_no_code(tmp_path):
    content = {"compression": None, "generators": {}, "buffers": {}, "data": {"code": Code(tmp_path / "executed")}}
    entry = write(tmp_path, shard(0), content)
    with pytest.raises(CheckpointError, match=f"{shard(0)} cannot be read"):
        read_own(Manifest(1, 1, 1, {shard(0): entry, SHARED: entry}), tmp_path, 0)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("sign", [1, -1])
def test_integers_beyond_255_bytes_are_refused_with_the_remedy(sign):
    longest = sign * (2**2039 - 1)
    assert reloaded(longest) == longest
    require_loadable(longest, "data")
    for value, where in [
        (sign * 2**2040, "data is"),
        ({"seed": [sign * 2**2040]}, r"data\['seed'\]\[0\] is"),
        ({sign * 2**2040: 1}, r"data \(key <integer of 2041 bits>\) is"),
        ({sign * 2**200_000: [2**200_000]}, "data .*"),
    ]:
        with pytest.raises(ValueError, match=rf"^{where}.* an integer of \d+ bits, .*2039: save it as a string, hex"):
            require_loadable(value, "data")


def test_nesting_too_deep_for_pickle_is_refused():
    def nested(levels):
        return [] if levels == 1 else [nested(levels - 1)]

    require_loadable(nested(100), "data")
    cycle = {}
    cycle["self"] = cycle
    for value in (nested(101), nested(900), cycle):
        with pytest.raises(ValueError, match=r"^data.* is nested more than 100 levels deep, or contains itself: fl"):
            require_loadable(value, "data")


def attributed(value):
    value.tag = Anything()
    return value


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (attributed(torch.zeros(2)), "data is of type torch.Tensor"),
        (attributed(nn.Parameter(torch.zeros(2))), "data is of type torch.nn.parameter.Parameter"),
        (attributed(OrderedDict()), "data.tag is of type .*Anything"),
        (np.float64(1), "data is of type numpy.float64.*item"),
        (np.zeros(2), "data is of type numpy.ndarray.*from_numpy"),
        ({2**3000}, "data is of type builtins.set"),
        (namedtuple("Pair", "a b")(1, 2), "data is of type .*Pair"),
        (type("Text", (str,), {})("a"), "data is of type .*Text"),
        (type("Real", (float,), {})(1), "data is of type .*Real"),
    ],
)
def test_objects_that_only_resemble_plain_values_are_refused(value, where):
    with pytest.raises(ValueError, match=where):
        require_loadable(value, "data")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers() | st.sampled_from([2038, 2039, 2040, 2041, 4000]).map(lambda bits: -(1 << bits)),
    st.floats() | st.complex_numbers() | st.floats().map(np.float64),
    st.text() | st.just("\ud800") | st.binary() | st.binary().map(bytearray),
    st.lists(st.integers(0, 3)).map(torch.Size),
    st.sets(st.integers() | st.just(2**2050)),
    st.lists(st.text(max_size=1)).map(Counter),
    st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.strided, ..., int, np.int64(1), Anything]),
)
KEYS = st.none() | st.booleans() | st.integers() | st.just(2**2040) | st.text() | st.tuples(st.integers(), st.text())
DATA = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
    ),
    max_leaves=10,
)


@settings(max_examples=60)
@given(DATA)
def test_accepted_values_are_loaded_unchanged(value):
    try:
        require_loadable(value, "data")
    except ValueError:
        return
    loaded = reloaded(value)
    assert described(loaded) == described(value)


def described(value):
    """Return types and bits, for which NaN equals NaN and True is not 1."""
    if isinstance(value, dict):
        return type(value), [(described(key), described(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), list(map(described, value))
    return type(value), value if isinstance(value, (int, str, set)) else repr(value)
