"""The configuration: presets, text form, and every wrong value named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import horovod_sparse as hvs
from horovod_sparse.collectives import COLLECTIVES, Dense, TopkA
from horovod_sparse.memories import NoMemory, Residual
from horovod_sparse.place import Place
from horovod_sparse.schedules import Constant
from horovod_sparse.sparsifiers import SPARSIFIERS, TopK

PLACE = Place(100, np.zeros(0, np.float32))


@pytest.mark.parametrize("density", [0, -0.1, 1.0001, float("nan"), float("inf"), "0.1", None, True])
def test_density_outside_its_range_is_refused(density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], not .*"):
        hvs.Compression.topka(density)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk", r"unknown compression 'topk'; known are: none, fp16, topka, topkdsa, gtopk, oktopk,.*auto, dense"),
        ("", "unknown compression ''"),
        ("topka:density=2", r"density must be in \(0, 1\], not 2"),
        ("topka:densty=0.1", "unknown option 'densty'; known are: .*density.*threads"),
        ("topka:memory=residul", "unknown memory 'residul'; known are: residual, none"),
        ("topka:sparsifier=best", "unknown sparsifier 'best'; known are: topk,"),
        ("topka:collective=ring", "unknown collective 'ring'; known are: topka, topkdsa,"),
        ("topka:density", "'density' in 'topka:density' is not of the form key=value"),
        ("topka:density=0.1,bucket_bytes=0", "bucket_bytes must be a whole number of at least 1, not 0"),
        ("topka:dense_below=many", "dense_below must be a whole number of at least 0, not 'many'"),
        ("none:density=0.1", "takes no settings"),
        ("threshold", "compression 'threshold' needs threshold, as in threshold:threshold=0.1"),
        ("topka:wire=float8", "unknown wire format 'float8'; known are: float32, float16, bfloat16"),
        ("conef:saving=lots", "memory 'conef' cannot be made with the options {'saving': 'lots'}: .* not supported"),
        ("conef:saving=1.5", r"saving must be in \(0, 1\), not 1.5"),
        ("conef:memory=partial,beta=0", r"beta must be in \(0, 1\], not 0"),
        ("gravac:cf_min=100,cf_max=10", "cf_min must not be above cf_max, but is 100"),
        ("gravac:cf_min=0.5", "cf_min must be at least 1, not 0.5"),
        ("gravac:sparsifier=randomk", "schedule 'gravac' sends the largest .* 'randomk' selects the same positions"),
        ("randomk:shared=False", "collective 'shared' sends values without indices"),
        ("stable:block=0", "block must be a whole number of at least 1, not 0"),
        ("topka:schedule=later", "unknown schedule 'later'; known are: constant, warmup, gravac, accordion"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_known_names(spec, message):
    with pytest.raises(ValueError, match=message):
        hvs.parse(spec)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("topka", ("topk", "topka")),
        ("topkdsa", ("topk", "topkdsa")),
        ("gtopk", ("topk", "gtopk")),
        ("oktopk", ("reusedtopk", "oktopk")),
        ("randomblock", ("randomblock", "shared")),
        ("hierarchical", ("topk", "hierarchical")),
        ("auto", ("topk", "auto")),
        ("gaussiank", ("gaussiank", "topka")),
        ("redsync", ("redsync", "topka")),
        ("dgc", ("dgc", "topka")),
        ("multilevel", ("multilevel", "topka")),
        ("stable", ("stable", "shared")),
        ("randomk", ("randomk", "shared")),
        ("conef", ("randomblock", "shared")),
        ("accordion", ("topk", "topka")),
    ],
)
def test_a_preset_pairs_a_collective_with_its_sparsifier(name, parts):
    from mpi4py import MPI

    sparse = hvs.parse(f"{name}:density=0.02")
    assert (sparse.sparsifier, sparse.collective, sparse.density) == (*parts, 0.02)
    assert sparse == getattr(hvs.Compression, name)(density=0.02)
    _, sparsifier, collective, _ = sparse.build(PLACE, MPI.COMM_SELF)
    assert (type(sparsifier), type(collective)) == (SPARSIFIERS[parts[0]], COLLECTIVES[parts[1]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "vgg",
            {"tau_threshold": 32, "dense_steps": 512, "local_low": 2 / 3, "global_high": 4 / 3, "global_up": 1.008},
        ),
        ("lstm", {"tau_threshold": 32, "dense_steps": 128, "local_low": 3 / 4, "local_high": 5 / 4}),
        (
            "bert",
            {"tau_threshold": 128, "dense_steps": 0, "local_scale": 1.025, "global_up": 1.036, "global_down": 1.025},
        ),
    ],
)
def test_the_published_schedules_of_oktopk_have_names(name, expected):
    options = hvs.parse(f"oktopk:published={name},throttle=2").options
    assert expected.items() <= options.items()
    assert (options["tau_partition"], options["throttle"]) == (64, 2)


def test_commas_inside_brackets_belong_to_a_value():
    sparse = hvs.parse("topka:schedule=warmup,warmup_densities=(0.5,0.1),steps_per_epoch=10,density=0.02")
    assert (sparse.options["warmup_densities"], sparse.options["steps_per_epoch"]) == ((0.5, 0.1), 10)
    assert sparse.density == 0.02


def test_gravac_begins_with_its_lowest_factor():
    sparse = hvs.parse("gravac:cf_min=20,cf_max=200")
    assert (sparse.schedule, sparse.density, sparse.options) == ("gravac", 1 / 20, {"cf_max": 200})


def test_a_single_option_overrides_a_published_schedule():
    assert hvs.Compression.oktopk(published="vgg", dense_steps=0).options["dense_steps"] == 0


def test_an_unknown_published_schedule_is_refused():
    with pytest.raises(ValueError, match="unknown published schedule 'gpt'; known are: vgg, lstm, bert"):
        hvs.Compression.oktopk(published="gpt")


def test_options_of_the_collectives_that_another_uses_are_accepted():
    from mpi4py import MPI

    sparse = hvs.parse("hierarchical:inner=gtopk,outer=topkdsa,throttle=2")
    assert type(sparse.build(PLACE, MPI.COMM_SELF)[2]) is COLLECTIVES["hierarchical"]
    with pytest.raises(ValueError, match="unknown option 'throtle'"):
        hvs.parse("auto:throtle=2")


def test_values_alone_cannot_travel_from_ranks_that_choose_different_positions():
    with pytest.raises(ValueError, match=r"collective 'shared' .*'topk' chooses different indices.*use randomblock"):
        hvs.parse("topka:collective=shared")


def test_a_spec_means_what_the_preset_means():
    assert hvs.parse("topka") == hvs.Compression.topka()
    assert hvs.parse("topka:density=0.05,memory=none,threads=2,dense_below=0") == hvs.Compression.topka(
        density=0.05, memory="none", threads=2, dense_below=0
    )
    assert hvs.parse("dense").density == 1.0


def test_horovods_own_compressors_have_their_names():
    from horovod.torch.compression import Compression

    assert hvs.parse("none") is hvs.Compression.none is Compression.none
    assert hvs.parse("fp16") is hvs.Compression.fp16 is Compression.fp16


def test_the_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hvs.Compression.topka().density = 0.5


@given(density=st.floats(1e-6, 1.0), size=st.integers(0, 10**9))
def test_k_is_the_density_rounded_and_at_least_one(density, size):
    k = hvs.Sparse(density).k(size)
    assert k == (0 if size == 0 else max(1, round(density * size)))
    assert k <= size


def test_build_makes_what_was_named():
    from mpi4py import MPI

    like = np.zeros(0, np.float64)
    sparse = hvs.Compression.topka(threads=2)
    memory, sparsifier, collective, schedule = sparse.build(Place(10, like), MPI.COMM_SELF)
    assert (type(memory), type(sparsifier), type(collective)) == (Residual, TopK, TopkA)
    assert type(schedule) is Constant
    assert memory.state_dict()["residual"].dtype == np.float64
    memory, _, collective, _ = hvs.Compression.dense().build(Place(10, like), MPI.COMM_SELF)
    assert (type(memory), type(collective)) == (NoMemory, Dense)


def test_an_option_out_of_range_is_refused():
    from mpi4py import MPI

    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        hvs.Compression.topka(threads=0).build(10, np.zeros(0, np.float32), MPI.COMM_SELF)
