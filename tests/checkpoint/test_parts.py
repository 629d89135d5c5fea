"""A checkpoint loads into an equal configuration, however that is written, and into no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import horovod_sparse as hvs
from horovod_sparse.checkpoint.parts import compare, load_others, shared_state

SPEC = "oktopk:density=0.05,tau_threshold=3,threads=1,memory=conef,compressor=quantize,bits=8"
PLAIN = SimpleNamespace(state_dict=dict)
DENSE = None


def exchange(spec):
    return SimpleNamespace(compression=hvs.parse(spec), state_dict=dict, merge=None)


def saved(one):
    return shared_state(torch.nn.Linear(1, 1), PLAIN, one, {})["compression"]


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        "oktopk:compressor=quantize,bits=8,memory=conef,threads=1,tau_threshold=3,density=0.05",
        SPEC.replace("threads=1", "threads=3"),
        SPEC.replace("density=0.05", "density=0.2"),
        f"{SPEC},bucket_bytes=100,dense_below=0",
    ],
    ids=["the same", "another order", "other threads", "another density", "another layout, which is compared itself"],
)
def test_an_equal_configuration_resumes(spec):
    assert compare(exchange(spec), saved(exchange(SPEC))) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tau_threshold=3", "tau_threshold=4", r"collective\.tau_threshold=3 \(now 4\)"),
        ("bits=8", "bits=4", r"memory\.bits=8 \(now 4\)"),
        ("memory=conef,compressor=quantize,bits=8", "memory=none", r"memory\.of=conef \(now none\)"),
    ],
)
def test_an_option_that_matters_is_named(old, new, message):
    with pytest.raises(ValueError, match=f"another compression, .*{message}.*load it with the one it was saved with"):
        compare(exchange(SPEC.replace(old, new)), saved(exchange(SPEC)))


def test_changing_between_dense_and_sparse_reports_the_effect_on_residuals():
    assert compare(DENSE, saved(exchange(SPEC))) == ["residuals are dropped: the exchange is dense now"]
    assert compare(exchange(SPEC), saved(DENSE)) == [
        "residuals start empty: the checkpoint was saved with a dense exchange"
    ]
    assert compare(DENSE, saved(DENSE)) == []


def test_other_objects_are_loaded_by_name():
    loaded = []
    scheduler = SimpleNamespace(load_state_dict=loaded.append)
    notes = load_others({"scheduler": scheduler}, {"scheduler": {"epoch": 3}, "scaler": {}})
    assert (loaded, notes) == ([{"epoch": 3}], ["the state of scaler is left out"])
    with pytest.raises(ValueError, match="holds no state of warmup, only of scaler: load it with the names"):
        load_others({"warmup": scheduler}, {"scaler": {}})
