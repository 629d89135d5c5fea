"""Ok-Topk: balanced regions, reused thresholds, and a volume that does not grow with the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from laws import Case, cases, check_exchange, dense, everywhere, examples, own_vector

from horovod_sparse.collectives import OkTopk, oktopk
from horovod_sparse.vector import SparseVector

pytestmark = [pytest.mark.mpi, pytest.mark.law]

SIZE, K = 100_000, 1000


def selection(comm, step, size=SIZE, k=K, clustered=False):
    """k random entries of this rank; clustered: nine tenths of them in the first tenth of the positions."""
    generator = np.random.default_rng([comm.Get_rank(), step])
    positions = generator.choice(size, k, replace=False)
    if clustered:
        low = generator.choice(size // 10, 9 * k // 10, replace=False)
        high = generator.choice(size - size // 10, k - low.size, replace=False)
        positions = np.concatenate([low, size // 10 + high])
    indices = np.sort(positions).astype(np.int32)
    return SparseVector(indices, generator.standard_normal(k).astype(np.float32), size)


@examples(20)
@given(case=cases)
def test_what_returns_is_all_that_missed_the_total_and_nothing_else(comm, case):
    exchange = check_exchange(comm, OkTopk(comm), case)
    mine = own_vector(case, comm)
    missed = ~np.isin(mine.indices, exchange.total.indices)
    assert everywhere(comm, np.array_equal(exchange.returned.indices, mine.indices[missed]))
    assert everywhere(comm, np.array_equal(exchange.returned.values, mine.values[missed]))


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_what_missed_the_total_returns_with_its_own_bits_whatever_the_format(comm, wire):
    vector = selection(comm, 0)
    exchange = OkTopk(comm, wire=wire).allreduce(vector, K)
    missed = ~np.isin(vector.indices, exchange.total.indices)
    came_back = dense(exchange.returned)[vector.indices[missed]]
    assert everywhere(comm, came_back.tobytes() == vector.values[missed].tobytes())
    assert missed.any() or comm.Get_size() == 1


def test_an_exact_step_keeps_the_k_largest_sums(comm):
    vector = selection(comm, 0)
    sums = comm.allreduce(dense(vector).astype(np.float64))
    total = OkTopk(comm).allreduce(vector, K).total
    least = np.sort(np.abs(sums))[-K]
    assert everywhere(comm, len(total) == K and np.abs(total.values).min() >= least * (1 - 1e-6))


def test_the_kth_entry_and_its_ties_are_sent(comm):
    vector = SparseVector(np.arange(5, dtype=np.int32), np.array([3, 1, 1, 1, 0.5], np.float32), 10)
    exchange = OkTopk(comm).allreduce(vector, 2)
    assert everywhere(comm, exchange.total.indices.tolist() == [0, 1, 2, 3])
    assert everywhere(comm, exchange.returned.indices.tolist() == [4])


def test_an_empty_result_raises_nothing(comm):
    case = Case(100, "all empty", seed=0)
    collective = OkTopk(comm)
    for _ in range(3):
        assert len(check_exchange(comm, collective, case).total) == 0


def test_the_threshold_is_exact_on_schedule_and_reused_in_between(comm, monkeypatch):
    calls = []

    def find(messenger, values, k):
        calls.append(step)
        return kth_magnitude(messenger, values, k)

    kth_magnitude = oktopk.kth_magnitude
    monkeypatch.setattr(oktopk, "kth_magnitude", find)
    collective = OkTopk(comm, tau_threshold=4)
    for step in range(10):
        collective.allreduce(selection(comm, step), K)
    assert calls == [0, 4, 8]


def test_the_boundaries_are_found_anew_on_schedule(comm, monkeypatch):
    calls = []
    partition = OkTopk._partition
    monkeypatch.setattr(OkTopk, "_partition", lambda self, *args: calls.append(step) or partition(self, *args))
    collective = OkTopk(comm, tau_partition=3)
    for step in range(7):
        collective.allreduce(selection(comm, step), K)
    assert calls == [0, 3, 6]


def test_the_number_of_entries_stays_inside_the_band(comm):
    collective = OkTopk(comm)
    counts = [len(collective.allreduce(selection(comm, step), K).total) for step in range(40)]
    assert everywhere(comm, all(2 / 3 * K <= count <= 4 / 3 * K for count in counts))


@pytest.mark.parametrize("factor", [1e6, 30, 0.03, 1e-6])
def test_a_threshold_that_is_far_off_is_found_anew_before_anything_travels(comm, factor):
    collective = OkTopk(comm)
    first, second = selection(comm, 0), selection(comm, 1)
    collective.allreduce(first, K)
    jumped = SparseVector(second.indices, (factor * second.values).astype(np.float32), SIZE)
    assert everywhere(comm, 2 / 3 * K <= len(collective.allreduce(jumped, K).total) <= 4 / 3 * K)


def test_a_total_that_nudging_brings_back_needs_no_exact_threshold(comm, monkeypatch):
    collective = OkTopk(comm, global_low=0.97, global_high=1.03, global_up=1.05, global_down=1.05)
    vector = selection(comm, 0)
    collective.allreduce(vector, K)
    monkeypatch.setattr(oktopk, "kth_magnitude", lambda *args: pytest.fail("found anew"))
    larger = SparseVector(vector.indices, vector.values * np.float32(1.05), SIZE)
    assert everywhere(comm, 0.97 * K <= len(collective.allreduce(larger, K).total) <= 1.03 * K)


def test_a_changed_k_takes_effect_at_once(comm):
    collective = OkTopk(comm)
    counts = [len(collective.allreduce(selection(comm, step), k).total) for step, k in enumerate([K, K // 2, K])]
    assert everywhere(comm, counts == [K, K // 2, K])


def test_regions_follow_the_entries_and_not_the_positions(comm):
    collective = OkTopk(comm)
    collective.allreduce(selection(comm, 0, clustered=True), K)
    ranks = comm.Get_size()
    inner = collective.state_dict()["boundaries"][1:-1]
    expected = np.interp(np.arange(1, ranks) / ranks, [0, 0.9, 1], [0, SIZE / 10, SIZE])
    assert everywhere(comm, bool((np.abs(inner - expected) < 0.05 * SIZE).all()))


def test_boundaries_are_summed_in_64_bits(comm):
    size = 2**31 - 1
    indices = np.arange(size - 64, size, dtype=np.int32)
    collective = OkTopk(comm)
    collective.allreduce(SparseVector(indices, np.ones(64, np.float32), size), 64)
    boundaries = collective.state_dict()["boundaries"]
    assert everywhere(comm, bool((boundaries[1:-1] >= size - 64).all() and (np.diff(boundaries) >= 0).all()))


def test_an_owner_with_far_more_than_the_mean_gives_entries_away(comm, monkeypatch):
    shares = []
    balance = oktopk.balance

    def spread(*args):
        result = balance(*args)
        shares.append(result[1])
        return result

    monkeypatch.setattr(oktopk, "balance", spread)
    collective = OkTopk(comm, tau_partition=100)
    ranks = comm.Get_size()
    collective.allreduce(selection(comm, 0), K)  # regions of about equal width
    indices = np.arange(K // ranks, dtype=np.int32)  # all in the first region
    exchange = collective.allreduce(SparseVector(indices, np.full(indices.size, 9, np.float32), SIZE), K)
    assert everywhere(comm, np.array_equal(exchange.total.indices, indices))
    if ranks > 4:
        assert everywhere(comm, max(shares[-1]) - min(shares[-1]) <= 1)
    else:
        assert shares == []  # P times the mean is at most 4 times


@pytest.mark.parametrize("clustered", [False, True])
def test_sends_at_most_6k_words(comm, clustered):
    collective = OkTopk(comm)
    k, size, ranks, steps = 20_000, 2_000_000, comm.Get_size(), 5
    collective.allreduce(selection(comm, 0, size, k, clustered), k)
    before = collective.traffic.bytes_sent
    for step in range(1, 1 + steps):
        collective.allreduce(selection(comm, step, size, k, clustered), k)
    sent = (collective.traffic.bytes_sent - before) / steps
    assert everywhere(comm, sent <= 4 * 6 * k * (ranks - 1) / ranks)


def test_the_first_steps_can_be_dense(comm):
    collective = OkTopk(comm, dense_steps=2)
    assert [collective.entries(100, 10) for _ in range(4)] == [100, 100, 10, 10]


def test_a_state_of_another_number_of_ranks_is_refused(comm):
    state = OkTopk(comm).state_dict()
    state["boundaries"] = np.zeros(comm.Get_size() + 2, np.int64)
    with pytest.raises(ValueError, match=rf"regions of {comm.Get_size() + 1} ranks, but there are {comm.Get_size()}"):
        OkTopk(comm).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_low": 1.5, "global_high": 1.2}, r"0 < low <= 1 <= high, but is \[1.5, 1.2\]"),
        ({"tau_threshold": 0}, "tau_threshold must be at least 1 step, not 0"),
        ({"tau_partition": 0}, "tau_partition must be at least 1"),
        ({"dense_steps": -1}, "dense_steps at least 0, not 64 and -1"),
        ({"global_up": 0.9}, "must be at least 1, not 0.9"),
        ({"throttle": 0}, "throttle must be at least 1, not 0"),
    ],
)
def test_numbers_out_of_range_are_refused(comm, options, message):
    with pytest.raises(ValueError, match=message):
        OkTopk(comm, **options)
