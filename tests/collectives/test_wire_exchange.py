"""Values in the format of the wire, through every collective that rounds; the laws themselves are with the others."""

from __future__ import annotations

import numpy as np
import pytest
from collectives.configurations import HIERARCHIES, NARROWER, every_rounding_collective
from laws import Case, check_exchange, dense, digest, everywhere, own_vector

from horovod_sparse.collectives import make
from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.mpi


@every_rounding_collective
@pytest.mark.parametrize(("wire", "dtype"), NARROWER)
def test_numbers_of_any_magnitude_come_out_in_parts_that_make_them_up_exactly(comm, name, options, wire, dtype):
    size, rank, ranks = 1000, comm.Get_rank(), comm.Get_size()
    generator = np.random.default_rng([7, rank])
    values = (generator.standard_normal(size) * np.exp(generator.uniform(-40, 80, size))).astype(dtype)
    values[np.arange(size) % ranks != rank] = 0  # each is one rank's number, so that sums are exact
    vector = SparseVector(np.arange(size, dtype=np.int32), values, size, shared=True)
    exchange = make(name, comm, {**options, "wire": wire}).allreduce(vector, size // 5)
    came_back = sum(comm.allgather(dense(exchange.returned)))
    assert everywhere(comm, np.array_equal(came_back + dense(exchange.total), sum(comm.allgather(values))))


@every_rounding_collective
def test_a_format_as_wide_as_the_values_changes_nothing(comm, name, options):
    vector = own_vector(Case(3000, "same indices", seed=1, share=0.05), comm)
    results = []
    for wire in (None, "float32"):
        collective = make(name, comm, {**options, "wire": wire})
        exchange = collective.allreduce(vector, 150)
        arrays = [one for each in (exchange.total, exchange.returned) for one in (each.indices, each.values)]
        results.append((digest(*arrays), collective.traffic))
    assert everywhere(comm, results[0] == results[1])


def bytes_sent(comm, name, options, dtype, density):
    """In the second step, when thresholds are known."""
    size = 100_000
    indices = np.arange(0, size, round(1 / density), dtype=np.int32)
    vector = SparseVector(indices, np.ones(indices.size, dtype), size, shared=True)
    collective, counts = make(name, comm, options), []
    for _ in range(2):
        collective.allreduce(vector, indices.size)
        counts.append(collective.traffic.bytes_sent)
    return counts[1] - counts[0]


PAIRS = [(name, {}, 0.05, 4) for name in ("topka", "topkdsa", "gtopk", "oktopk")]
PAIRS += [("hierarchical", options, 0.05, 4) for options in HIERARCHIES]


# Dense regions of TopkDSA have no indices: they travel with half of the values.
@pytest.mark.parametrize(("wire", "dtype"), NARROWER)
@pytest.mark.parametrize(
    ("name", "options", "density", "index"), [*PAIRS, ("topkdsa", {}, 1, 2), ("shared", {}, 0.05, 0)], ids=str
)
def test_values_travel_in_as_many_bytes_as_the_format_has(comm, name, options, density, index, wire, dtype):
    width = 2 if "16" in wire else 4
    full = bytes_sent(comm, name, options, dtype, density)
    short = bytes_sent(comm, name, {**options, "wire": wire}, dtype, density)
    expected = full * (index + width) / (index + np.dtype(dtype).itemsize)
    assert everywhere(comm, abs(short - expected) <= 0.02 * expected)
    assert comm.Get_size() == 1 or comm.allreduce(short) > 0


def test_shared_values_travel_in_two_phases(comm):
    collective, ranks = make("shared", comm, {"wire": "bfloat16"}), comm.Get_size()
    check_exchange(comm, collective, Case(4000 * ranks, "everything", seed=1))
    assert everywhere(comm, abs(collective.traffic.bytes_sent - 2 * 2 * 4000 * (ranks - 1)) <= 1)


@pytest.mark.parametrize("name", ["topkdsa", "gtopk", "oktopk", "shared"])
def test_owners_round_what_they_sum(comm, name):
    vector = own_vector(Case(2000, "same indices", seed=1, bits=7), comm)
    total = make(name, comm, {"wire": "bfloat16"}).allreduce(vector, 500).total
    assert everywhere(comm, not np.any(total.values.view(np.uint32) & 0xFFFF))


@pytest.mark.parametrize("name", ["topka", "topkdsa", "gtopk", "oktopk", "shared", "hierarchical", "auto"])
def test_an_unknown_format_is_refused(comm, name):
    with pytest.raises(ValueError, match="unknown wire format 'float8'; known are: float32, float16, bfloat16"):
        make(name, comm, {"wire": "float8"})
