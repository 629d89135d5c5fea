"""The benchmark's verification finds what is wrong, and its figures are what its columns say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from laws import everywhere

from horovod_sparse.cli import exchanges
from horovod_sparse.cli.exchanges import Gradients
from horovod_sparse.collectives import Exchange, TopkA
from horovod_sparse.compression import Compression
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]

SIZE, K = 3000, 30


@pytest.fixture
def correct(comm):
    """A vector of random entries on each rank, and its exchange."""
    generator = np.random.default_rng(comm.Get_rank())
    indices = np.sort(generator.permutation(SIZE)[:K]).astype(np.int32)
    vector = SparseVector(indices, generator.standard_normal(K).astype(np.float32) + 3, SIZE)
    return vector, TopkA(comm).allreduce(vector, K)


def changed(vector, **fields):
    """A copy of a vector whose arrays may be changed."""
    return replace(vector, indices=vector.indices.copy(), values=vector.values.copy(), **fields)


def test_a_correct_exchange_has_nothing_wrong(comm, correct):
    assert exchanges.wrong(comm, *correct) == 0


def test_what_is_returned_counts_as_kept(comm, correct):
    vector, exchange = correct
    position = exchange.total.indices[0]
    mine = vector.indices == position
    returned = SparseVector(vector.indices[mine], vector.values[mine], SIZE)
    total = SparseVector(exchange.total.indices[1:], exchange.total.values[1:], SIZE)
    assert exchanges.wrong(comm, vector, Exchange(total, returned)) == 0
    assert exchanges.wrong(comm, vector, Exchange(total, vector.nothing())) == 1


@pytest.mark.parametrize("value", [0.0, np.nan, 1e9])
def test_a_wrong_element_is_counted(comm, correct, value):
    vector, exchange = correct
    total = changed(exchange.total)
    total.values[[1, 5]] = value
    assert exchanges.wrong(comm, vector, Exchange(total, exchange.returned)) == 2


def test_bits_that_differ_from_rank_to_rank_are_counted(comm, correct):
    vector, exchange = correct
    total = changed(exchange.total)
    if comm.Get_rank() > 0:
        total.values[2] = np.nextafter(total.values[2], np.float32(np.inf))
    assert exchanges.wrong(comm, vector, Exchange(total, exchange.returned)) == comm.Get_size() - 1


def test_an_exchange_of_many_chunks_is_verified_to_its_end(comm, monkeypatch, correct):
    monkeypatch.setattr(exchanges, "_CHUNK", 70)
    vector, exchange = correct
    total = changed(exchange.total)
    assert exchanges.wrong(comm, vector, exchange) == 0
    total.values[-1] += 1
    assert exchanges.wrong(comm, vector, Exchange(total, exchange.returned)) == 1


def test_gradients_differ_from_iteration_to_iteration_and_from_rank_to_rank(comm):
    gradients = Gradients(SIZE, (7, comm.Get_rank()))
    assert not np.array_equal(gradients[0], gradients[1])
    assert np.array_equal(gradients[1], Gradients(SIZE, (7, comm.Get_rank()))[1])
    first = comm.allgather(gradients[0].tobytes())
    assert len(set(first)) == comm.Get_size()


@pytest.mark.parametrize(
    "name", ["dense", "topka", "topkdsa", "gtopk", "oktopk", "randomblock", "hierarchical", "auto"]
)
def test_every_preset_is_measured_and_nothing_is_wrong(comm, name):
    preset = getattr(Compression, name)
    sparse = preset() if name == "dense" else preset(density=0.01)
    row = exchanges.measure(name, sparse, Gradients(SIZE, (1, comm.Get_rank())), SIZE, comm, iterations=3, warmup=1)
    assert row.wrong == 0
    unchecked = exchanges.measure(name, sparse, Gradients(SIZE, (1, comm.Get_rank())), SIZE, comm, 1, 0, check=False)
    assert unchecked.wrong is None
    assert 0 < row.best_ms <= row.max_ms
    assert row.min_ms <= row.avg_ms <= row.max_ms
    assert 0 < row.exchange_ms < row.min_ms
    assert row.total_entries > 0
    assert everywhere(comm, comm.bcast(row) == row)


def test_bandwidths_and_bytes_follow_the_formulas(comm):
    sparse = Compression.topka(density=0.01)
    row = exchanges.measure("topka", sparse, Gradients(SIZE, (1, comm.Get_rank())), SIZE, comm, iterations=4, warmup=2)
    ranks = comm.Get_size()
    assert (row.size, row.nbytes, row.density, row.entries) == (SIZE, 4 * SIZE, 0.01, K)
    assert row.algbw == pytest.approx(4 * SIZE / (row.max_ms * 1e-3) / 1e9)
    assert row.busbw == pytest.approx(row.algbw * 2 * (ranks - 1) / ranks)
    counts = 8 * (ranks - 1)
    assert row.wire_bytes == pytest.approx(8 * K * (ranks - 1) + counts, abs=1)
