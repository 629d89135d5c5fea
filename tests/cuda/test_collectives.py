"""Every collective gives vectors of the device the total and the rest that it gives vectors of the host, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cupy
import numpy as np
import pytest
from collectives.configurations import ROUNDING, every_collective, fits
from devices import on_device
from exchanges import AWARE, DIFFERENT, STAGED, allocations, arrays, results, through, vector_on_device
from hypothesis import given
from hypothesis import strategies as st
from laws import PATTERNS, Case, digest, examples, own_vector, rounded_cases

from horovod_sparse import pinned, staging
from horovod_sparse.collectives import auto, make
from horovod_sparse.compression import Compression
from horovod_sparse.costmodel import Compute
from horovod_sparse.network import Link
from horovod_sparse.place import Place
from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.mpi

FORMATS = [None, "float32", "float16", "bfloat16"]
CASES = st.builds(
    Case,
    size=st.one_of(st.integers(1, 40), st.integers(1, 600)),
    pattern=st.sampled_from(PATTERNS),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(["float32", "float64"]),
    share=st.sampled_from([1e-9, 0.01, 0.3, 1.0]),
)


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """What Auto would measure: a network on which it chooses now this, now that."""
    monkeypatch.setattr(auto, "measure_link", lambda comm, like: Link(50e-6, 8e-9))
    monkeypatch.setattr(auto, "measure_compute", lambda like, comm: Compute(0.4e-9, 0.3e-9, 0.3e-9, 3e-9))


def check_parity(
    comm: Any, name: str, options: dict[str, Any], sent: list[tuple[SparseVector, int]], ways: Any = (STAGED,)
) -> None:
    """The same steps on the host and on the device; the ranks that fail, fail together."""
    expected = [digest(*results(exchange)) for exchange in run(comm, name, options, sent)]
    for way in ways:
        with through(way):
            before = [digest(*arrays(vector)) for vector, _ in sent]
            given_ = [(vector_on_device(vector), k) for vector, k in sent]
            exchanges = run(comm, name, options, given_)
            found = [digest(*results(exchange)) for exchange in exchanges]
            kinds = {type(one) for each in exchanges for one in (each.total.values, each.returned.values)}
        checks = {
            "the bits are the host's": found == expected,
            "the result is on the device": kinds <= {cupy.ndarray},
            "the argument is not changed": [digest(*arrays(vector)) for vector, _ in given_] == before,
        }
        failures = comm.allgather([what for what, holds in checks.items() if not holds])
        assert not any(failures), (way, failures)


def run(comm: Any, name: str, options: dict[str, Any], sent: list[tuple[SparseVector, int]]) -> list[Any]:
    collective = make(name, comm, options)
    return [collective.allreduce(vector, k) for vector, k in sent]


def of_this_rank(comm: Any, case: Case) -> tuple[SparseVector, int]:
    return own_vector(case, comm), case.k


@pytest.mark.law
@every_collective
@examples(4)
@given(steps=st.lists(CASES, min_size=1, max_size=2))
def test_the_device_computes_what_the_host_does(comm, name, options, steps):
    sent = [of_this_rank(comm, case) for case in steps if fits(name, case)]
    check_parity(comm, name, options, sent, (STAGED, AWARE))


@pytest.mark.parametrize(("name", "options"), ROUNDING, ids=str)
@examples(3)
@given(data=st.data())
def test_and_rounds_as_it_does(comm, name, options, data):
    case = data.draw(rounded_cases(data.draw(st.sampled_from(["float32", "float64"]))))
    case = replace(case, size=1 + case.size % 600)
    options = {**options, "wire": data.draw(st.sampled_from(FORMATS))}
    check_parity(comm, name, options, [of_this_rank(comm, case)] if fits(name, case) else [])


@every_collective
def test_numbers_of_any_kind_are_exchanged(comm, name, options):
    generator = np.random.default_rng(comm.Get_rank())
    values = generator.standard_normal(200).astype(np.float32) * np.float32(1e30)
    values[::7], values[3], values[8] = 0, np.inf, -np.nan
    if comm.Get_rank():
        values[[3, 8]] = 1
    vector = SparseVector(np.arange(0, 400, 2, dtype=np.int32), values, 400, shared=True)
    with np.errstate(invalid="ignore"):
        check_parity(comm, name, options, [(vector, 50)])


@pytest.mark.law
@every_collective
def test_vectors_without_indices_are_summed_dense(comm, monkeypatch, name, options):
    monkeypatch.setattr(staging, "PIECE_BYTES", 4096)
    values = np.random.default_rng(comm.Get_rank()).integers(-99, 99, 5000).astype(np.float32) / 8
    check_parity(comm, name, options, [(SparseVector.full(values), 10)])


@pytest.mark.law
@pytest.mark.parametrize("name", ["topka", "topkdsa", "gtopk", "oktopk"])
def test_works_where_ranks_outnumber_elements(comm, name):
    cases = [Case(size, pattern, seed=1) for size in (1, 3) for pattern in ("everything", "all empty")]
    check_parity(comm, name, {}, [of_this_rank(comm, case) for case in cases])


@pytest.mark.law
@pytest.mark.parametrize("name", ["topka", "topkdsa", "gtopk", "oktopk", "shared", "hierarchical", "dense"])
def test_ranks_may_differ_in_how_they_reach_mpi(comm, name):
    case = Case(6000, "same indices", seed=1)
    vector, k = of_this_rank(comm, case)
    expected = digest(*results(make(name, comm, {}).allreduce(vector, k)))
    with through(DIFFERENT, comm.Get_rank()):
        found = digest(*results(make(name, comm, {}).allreduce(vector_on_device(vector), k)))
    assert all(comm.allgather(found == expected))


# --- what it costs -------------------------------------------------------------------------------------------------


transfers = getattr(cupy, "transfers", {})  # only the stand-in counts


def steps(comm: Any, shared: bool) -> Iterator[SparseVector]:
    """Vectors of one density, whose lengths differ a little."""
    for seed in range(5):
        generator = np.random.default_rng([seed, 0 if shared else comm.Get_rank()])
        indices = np.flatnonzero(generator.random(8000) < 0.1).astype(np.int32)
        values = generator.standard_normal(indices.size).astype(np.float32)
        yield SparseVector(on_device(indices), on_device(values), 8000, shared=shared)


# How often it is waited for in a step that renews nothing: for the number of entries of each sum, and before messages
# or pieces of a dense sum leave. On more ranks, gTopk's tree has more levels, and Ok-Topk and TopkDSA send more often.
@pytest.mark.parametrize(
    ("name", "waits"), [("dense", 8), ("shared", 1), ("topka", 2), ("topkdsa", 6), ("gtopk", 8), ("oktopk", 8)]
)
def test_pinned_memory_is_allocated_once_and_the_device_seldom_waited_for(comm, monkeypatch, name, waits):
    monkeypatch.setattr(staging, "PIECE_BYTES", 1 << 12)
    collective, counts = make(name, comm, {}), []
    with through(STAGED), allocations() as sizes:
        for vector in steps(comm, shared=name == "shared"):
            cupy.cuda.get_current_stream().synchronize()
            transfers.clear()
            collective.allreduce(vector, 800)
            counts.append(len(sizes))
        held = sum(block.size for blocks in pinned.pool()._idle.values() for block in blocks)
    if comm.Get_size() <= 4:
        assert sum(transfers.values()) <= waits, transfers
    assert counts[-1] - counts[2] <= 1, sizes  # at most one that grew
    # A message's block is less than twice as long; a rank may hold a message of every rank, and what it sends.
    selection = 8 * 800 * 1.2 * comm.Get_size()
    assert held <= (2 << 12 if name == "dense" else 2 * 2 * selection + (1 << 12) * comm.Get_size())
    assert (held > 0) == (comm.Get_size() > 1)


# --- Auto ----------------------------------------------------------------------------------------------------------


def test_auto_measures_for_the_dtype_and_device_of_the_bucket(comm, monkeypatch):
    likes = []
    monkeypatch.setattr(auto, "measure_link", lambda comm, like: likes.append(like) or Link(50e-6, 8e-9))
    for like in (cupy.empty(7, np.float64), np.empty(7, np.float32)):
        place = Place(1000, like, rank=comm.Get_rank(), ranks=comm.Get_size())
        collective = Compression.auto(0.01).build(place, comm)[2]
        collective.entries(1000, 10)
    expected = [(cupy.ndarray, np.float64), (np.ndarray, np.float32)] if comm.Get_size() > 1 else []
    assert [(type(like), like.dtype) for like in likes] == expected
