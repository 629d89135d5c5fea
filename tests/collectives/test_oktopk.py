"""Ok-Topk: balanced regions, reused thresholds, and a volume that does not grow with the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from laws import cases, check_exchange, dense, everywhere, examples, make, own_vector

from horovod_sparse.collectives import OkTopk, oktopk
from horovod_sparse.transport import base
from horovod_sparse.vector import SparseVector

pytestmark = pytest.mark.law

SIZE, K = 50_000, 500


def selection(transport, step, size=SIZE, k=K, clustered=False):
    """Return k random entries of this rank; clustered: nine tenths of them in the first tenth of the positions."""
    generator = np.random.default_rng([transport.rank, step])
    positions = generator.choice(size, k, replace=False)
    if clustered:
        low = generator.choice(size // 10, 9 * k // 10, replace=False)
        high = generator.choice(size - size // 10, k - low.size, replace=False)
        positions = np.concatenate([low, size // 10 + high])
    indices = np.sort(positions).astype(np.int32)
    return SparseVector(indices, generator.standard_normal(k).astype(np.float32), size)


def scaled(vector, factor):
    return SparseVector(vector.indices, (factor * vector.values).astype(np.float32), vector.size)


@examples(15)
@given(case=cases(most=5000))
def test_exactly_the_entries_missing_from_the_total_are_returned(transport, case):
    reduced = check_exchange(transport, make(transport, "oktopk", case.dtype), case)
    mine = own_vector(case, transport)
    missed = ~np.isin(mine.indices, reduced.total.indices)
    assert everywhere(transport, np.array_equal(reduced.returned.indices, mine.indices[missed]))
    assert everywhere(transport, np.array_equal(reduced.returned.values, mine.values[missed]))


def test_returned_entries_are_unrounded_in_every_wire_format(transport):
    vector = selection(transport, 0)
    reduced = make(transport, "oktopk", wire="bfloat16").allreduce(vector, K)
    missed = ~np.isin(vector.indices, reduced.total.indices)
    came_back = dense(reduced.returned)[vector.indices[missed]]
    assert everywhere(transport, came_back.tobytes() == vector.values[missed].tobytes())
    assert missed.any() or transport.size == 1


def test_many_equal_magnitudes_do_not_exceed_k(transport):
    """Rounded to 16 bits, the magnitudes that error feedback sends are few different ones."""
    collective, counts = make(transport, "oktopk"), []
    for step in range(200):
        generator = np.random.default_rng([step, transport.rank])
        indices = np.sort(generator.choice(SIZE, 2 * K, replace=False)).astype(np.int32)
        vector = SparseVector(indices, generator.choice([1, -1, 1.25, -1.25], 2 * K).astype(np.float32), SIZE)
        counts.append(len(collective.allreduce(vector, K).total))
    assert everywhere(transport, max(counts) <= 4 / 3 * K)


@pytest.mark.mpi
def test_threshold_and_boundaries_are_renewed_on_schedule_and_reused_in_between(transport, monkeypatch):
    exact, partitions = [], []
    find, partition = oktopk.kth_magnitude, OkTopk._partition
    monkeypatch.setattr(oktopk, "kth_magnitude", lambda *args: exact.append(step) or find(*args))
    monkeypatch.setattr(OkTopk, "_partition", lambda *args: partitions.append(step) or partition(*args))
    collective = make(transport, "oktopk", tau_threshold=4, tau_partition=3)
    for step in range(10):
        collective.allreduce(selection(transport, step), K)
    assert (exact, partitions) == ([0, 4, 8], [0, 3, 6, 9])


BERT = {"tau_threshold": 128, "global_low": 4 / 5, "global_high": 5 / 4, "global_up": 1.036, "global_down": 1.025}


@pytest.mark.parametrize(("options", "low", "high"), [({}, 2 / 3, 4 / 3), (BERT, 4 / 5, 5 / 4)], ids=["", "bert"])
def test_the_number_of_entries_stays_within_its_bounds_for_hundreds_of_steps(transport, options, low, high):
    """Magnitudes that stay, then shrink as gradients do, then grow; regions move with the entries."""
    collective, counts, factor = make(transport, "oktopk", tau_partition=16, **options), [], 1.0
    for step in range(300):
        factor *= (1.0, 0.98, 1.02)[step // 100]
        vector = scaled(selection(transport, step, 5000, 200, clustered=step >= 150), factor)
        counts.append(len(collective.allreduce(vector, 200).total))
    assert everywhere(transport, all(low * 200 <= count <= high * 200 for count in counts))
    inner = collective.state_dict()["boundaries"][1:-1]
    expected = np.interp(np.arange(1, transport.size) / transport.size, [0, 0.9, 1], [0, 500, 5000])
    assert everywhere(transport, bool((np.abs(inner - expected) < 250).all()))  # those of the last steps' entries


@pytest.mark.parametrize("factor", [1e6, 30, 0.03, 1e-6])
def test_a_threshold_far_outside_the_band_is_renewed_before_the_exchange(transport, factor):
    collective = make(transport, "oktopk")
    collective.allreduce(selection(transport, 0), K)
    total = collective.allreduce(scaled(selection(transport, 1), factor), K).total
    assert everywhere(transport, 2 / 3 * K <= len(total) <= 4 / 3 * K)


def test_adjusting_the_threshold_avoids_an_exact_one(transport, monkeypatch):
    collective = make(transport, "oktopk", global_low=0.97, global_high=1.03, global_up=1.05, global_down=1.05)
    vector = selection(transport, 0)
    collective.allreduce(vector, K)
    monkeypatch.setattr(oktopk, "kth_magnitude", lambda *args: pytest.fail("found anew"))
    assert everywhere(transport, 0.97 * K <= len(collective.allreduce(scaled(vector, 1.05), K).total) <= 1.03 * K)


def shifting(transport, step, size, k):
    """Return an adversarial selection of up to 4/3 k entries, whose regions and magnitudes change in each step.

    They lie in one region, in all but the rank's own, in two, or everywhere; the largest in one region, or anywhere.
    """
    rank, ranks, shared = transport.rank, transport.size, np.random.default_rng([3, step])
    width = size // ranks
    kind, busy, winner = shared.integers(4), shared.integers(ranks), shared.integers(ranks + 1)
    generator = np.random.default_rng([rank, step])
    others = [other for other in range(ranks) if other != rank]
    regions = np.unique([[busy], others or [0], [busy, rank], list(range(ranks))][kind])
    places = (regions[:, None] * width + np.arange(width)).ravel()
    count = min(places.size, generator.integers(2 * k // 3, 4 * k // 3 + 1))
    indices = np.sort(generator.choice(places, count, replace=False))
    values = generator.uniform(1, 2, indices.size) * np.where(indices // width == winner, 4, 1)
    return SparseVector(indices.astype(np.int32), values.astype(np.float32), size)


def noting_traffic(monkeypatch, where, name, traffic):
    """Return a list of the entries that each call of a function sends and receives."""
    calls, function = [], getattr(where, name)

    def call(*given):
        before = traffic.bytes_sent, traffic.bytes_received
        result = function(*given)
        calls.append(((traffic.bytes_sent - before[0]) / 8, (traffic.bytes_received - before[1]) / 8))
        return result

    monkeypatch.setattr(where, name, call)
    return calls


@pytest.mark.mpi
@pytest.mark.parametrize(("worth", "size", "k", "steps"), [(1, 4000, 120, 100), (2**16, 60_000, 6000, 10)])
def test_the_volume_is_bounded_for_every_selection(transport, monkeypatch, worth, size, k, steps):
    """The bounds of docs/collectives/oktopk.md, in entries of two words; regions stay those of the first step.

    A header and what aligns it is four entries at most, of each of up to 3 P messages.
    """
    monkeypatch.setattr(oktopk, "_WORTH", worth)
    monkeypatch.setattr(base, "RING_BYTES", 1)  # whose traffic is counted, not estimated
    collective, ranks = make(transport, "oktopk", tau_partition=10_000, indices="plain"), transport.size
    uniform = np.linspace(0, size - 1, k).astype(np.int32)
    collective.allreduce(SparseVector(uniform, np.ones(k, np.float32), size), k)
    own, traffic = collective._transport, collective.traffic
    apart = [
        noting_traffic(monkeypatch, own, name, traffic) for name in ("allreduce", "allgather_integers")
    ]  # histograms, counts
    steps_taken = noting_traffic(monkeypatch, collective, "_allreduce", traffic)
    spread, lengths, gather = noting_traffic(monkeypatch, oktopk, "balance", traffic), [], own.allgather
    monkeypatch.setattr(own, "allgather", lambda *given: lengths.append(given[1]) or gather(*given))
    rows = []
    for step in range(steps):
        for calls in (*apart, spread):
            calls.clear()
        vector = shifting(transport, step, size, k)
        total = len(collective.allreduce(vector, k).total)
        entries = np.array(steps_taken[-1]) - sum(np.sum(calls, 0) for calls in apart if calls)
        rows.append((len(vector), total, *entries, max(spread[0]) if spread else 0, max(lengths[-1], default=0) / 8))
    selected, total, sent, received, moved, largest = np.moveaxis(
        transport.allgather_object(rows), -1, 0
    )  # [rank, step]
    twice = 2 * total * (ranks - 1) / ranks
    assert (total <= 4 / 3 * k).all()
    assert (sent <= selected + twice + 12 * ranks).all()
    assert (sent <= 4 * k + 12 * ranks).all()
    assert (received <= selected.sum(0) - selected + total + 12 * ranks).all()
    assert (moved.max(0) + (ranks - 1) * largest <= twice + worth / 8 + 12 * ranks).all()
    assert ranks < 3 or worth > 1 or moved.any()


@pytest.mark.parametrize("clustered", [False, True])
def test_balanced_regions_send_no_more_than_the_published_volume(transport, clustered):
    collective = make(transport, "oktopk")
    k, size, ranks, steps = 10_000, 1_000_000, transport.size, 4
    collective.allreduce(selection(transport, 0, size, k, clustered), k)
    before = collective.traffic.bytes_sent
    for step in range(1, 1 + steps):
        collective.allreduce(selection(transport, step, size, k, clustered), k)
    sent = (collective.traffic.bytes_sent - before) / steps
    assert everywhere(transport, sent <= 4 * 6 * k * (ranks - 1) / ranks)


def test_a_state_of_another_world_size_is_refused(transport):
    state = make(transport, "oktopk").state_dict()
    state["boundaries"] = np.zeros(transport.size + 2, np.int64)
    with pytest.raises(ValueError, match=rf"regions of {transport.size + 1} ranks, but there are {transport.size}"):
        make(transport, "oktopk").load_state_dict(state)
