"""The configuration: presets, text form, and every wrong value named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import horovod_sparse as hvs
from horovod_sparse.collectives import Dense, TopkA
from horovod_sparse.memories import NoMemory, Residual
from horovod_sparse.sparsifiers import TopK


@pytest.mark.parametrize("density", [0, -0.1, 1.0001, float("nan"), float("inf"), "0.1", None, True])
def test_density_outside_its_range_is_refused(density):
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], not .*"):
        hvs.Compression.topka(density)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk", "unknown compression 'topk'; known are: none, fp16, topka, dense"),
        ("", "unknown compression ''"),
        ("topka:density=2", r"density must be in \(0, 1\], not 2"),
        ("topka:densty=0.1", "unknown option 'densty'; known are: .*density.*threads"),
        ("topka:memory=residul", "unknown memory 'residul'; known are: residual, none"),
        ("topka:sparsifier=best", "unknown sparsifier 'best'; known are: topk"),
        ("topka:collective=ring", "unknown collective 'ring'; known are: topka, dense"),
        ("topka:density", "'density' in 'topka:density' is not of the form key=value"),
        ("topka:density=0.1,bucket_bytes=0", "bucket_bytes must be a whole number of at least 1, not 0"),
        ("topka:dense_below=many", "dense_below must be a whole number of at least 0, not 'many'"),
        ("none:density=0.1", "takes no settings"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_known_names(spec, message):
    with pytest.raises(ValueError, match=message):
        hvs.parse(spec)


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
    memory, sparsifier, collective = sparse.build(10, like, MPI.COMM_SELF)
    assert (type(memory), type(sparsifier), type(collective)) == (Residual, TopK, TopkA)
    assert memory.state_dict()["residual"].dtype == np.float64
    memory, _, collective = hvs.Compression.dense().build(10, like, MPI.COMM_SELF)
    assert (type(memory), type(collective)) == (NoMemory, Dense)


def test_an_option_out_of_range_is_refused():
    from mpi4py import MPI

    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        hvs.Compression.topka(threads=0).build(10, np.zeros(0, np.float32), MPI.COMM_SELF)
