"""SCAPE: positions that each rank chooses for a part of the bucket, one step before they are used."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, same_bits, sum_bytes
from rules import LIKE, eighths, made, normal, take

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers import SCAPE
from horovod_sparse.vector import SparseVector


class Reference:
    """All ranks' steps, as written down, with shared; arrays have shape (ranks, elements)."""

    def __init__(self, ranks, size, beta, residual):
        self.held, self.moment = np.zeros((ranks, size), np.float32), np.zeros(size)
        self.beta, self.residual, self.next = beta, residual, None

    def choose(self, turn, k):
        ranks, size = self.held.shape
        chosen = []
        for rank, held in enumerate(self.held):
            part = (turn + rank) % ranks
            begin, end = part * size // ranks, (part + 1) * size // ranks
            score = np.abs(self.moment) + (np.abs(held) if self.residual or not self.moment.any() else 0)
            share = (part + 1) * k // ranks - part * k // ranks
            chosen += [begin + position for position in np.argsort(-score[begin:end], kind="stable")[:share].tolist()]
        return sorted(chosen)

    def step(self, number, gradients, k, dense):
        self.held += gradients
        positions = slice(None) if dense else self.choose(number, k) if self.next is None else self.next
        total = np.zeros_like(gradients[0])
        total[positions] = self.held[:, positions].sum(0)
        self.held[:, positions] = 0
        if not dense:
            self.next = self.choose(number + 1, k)
        self.moment = self.beta * self.moment + (1 - self.beta) * total / len(gradients)
        return total


@pytest.mark.law
@pytest.mark.parametrize(("size", "density"), [(1200, 0.05), (50, 0.1), (7, 0.3)])
@pytest.mark.parametrize(
    ("beta", "residual", "dense_steps"), [(0.9, True, 0), (0.9, True, 2), (0.9, False, 2), (0.0, True, 0)]
)
def test_every_step_is_that_of_the_reference(transport, size, density, beta, residual, dense_steps):
    spec = Sparse.of(density, "scape", collective="shared", beta=beta, residual=residual, dense_steps=dense_steps)
    pipeline, ranks, k = pipeline_for(spec, size, LIKE, transport), transport.size, max(1, round(density * size))
    generator, reference = np.random.default_rng(5), Reference(transport.size, size, beta, residual)
    for number in range(20):
        gradients = eighths(generator, (ranks, size), 1000)
        output = np.full(size, np.nan, np.float32)
        pipeline.run([(0, gradients[transport.rank].copy())], [(0, output)], Step())
        expected = reference.step(number, gradients, k, dense=number < dense_steps)
        assert everywhere(transport, np.array_equal(output, expected)), number
        held = pipeline.state_dict()["memory"]["residual"]
        assert everywhere(transport, np.array_equal(held, reference.held[transport.rank]))


@pytest.mark.law
def test_in_hundreds_of_steps_nothing_is_lost_and_no_position_waits_for_ever(transport):
    """Each rank alone has gradients at some positions: only that rank can choose them."""
    size, steps, rank, ranks = 120, 600, transport.rank, transport.size
    pipeline = pipeline_for(Sparse.of(0.1, "scape", collective="shared"), size, LIKE, transport)
    mine = np.arange(size) % ranks == rank
    fed, delivered, last = np.zeros(size), np.zeros(size), np.zeros(size, int)
    for number in range(steps):
        gradient = (mine * (1 + np.arange(size) % 4) / 8).astype(np.float32)
        fed += gradient
        pipeline.run([(0, gradient)], [(0, gradient)], Step())
        delivered += gradient
        last[gradient != 0] = number
    held = pipeline.state_dict()["memory"]["residual"].astype(np.float64)
    assert everywhere(transport, np.array_equal(transport.allreduce(fed), delivered + transport.allreduce(held)))
    assert same_bits(transport, delivered.astype(np.float32), pipeline.sparsifier.state_dict()["moment"])
    assert everywhere(transport, last.min() >= steps - 80 * ranks), last.min()


@pytest.mark.law
def test_positions_travel_beside_the_values(transport):
    size, ranks, counts = 100_000, transport.size, []
    k = size // 10
    pipeline = pipeline_for(Sparse.of(0.1, "scape", collective="shared"), size, LIKE, transport)
    for number in range(8):
        gradient = np.random.default_rng([transport.rank, number]).standard_normal(size).astype(np.float32)
        pipeline.run([(0, gradient)], [(0, gradient)], Step())
        counts.append(pipeline.statistics(norms=False))
    expected = sum_bytes(transport, 4 * k) + 4 * k * (ranks - 1) / ranks
    assert everywhere(transport, 0.99 * expected <= counts[-1].bytes_sent <= 1.01 * expected + 200)
    assert everywhere(transport, counts[-1].rounds == 2 * (ranks > 1))  # those of the sum
    assert [count.events["positions_renewed"] for count in counts] == [1] + 7 * [0]


def test_what_is_sent_was_chosen_in_the_step_before():
    rule, k = made(SCAPE, 100), 10
    first, second = normal(1, 100), normal(2, 100)
    vector, _ = take(rule, first, k)
    assert np.array_equal(vector.indices, np.sort(np.argsort(-np.abs(first), kind="stable")[:k]))
    rule.observe(SparseVector(vector.indices, np.zeros(k, np.float32), 100))
    rest = first.copy()
    rest[vector.indices] = 0
    vector, _ = take(rule, second, k)
    assert np.array_equal(vector.indices, np.sort(np.argsort(-np.abs(rest), kind="stable")[:k]))


def test_what_was_delivered_is_chosen_again_while_its_moment_exceeds_the_residuals():
    rule, sent, again = made(SCAPE, 100, beta=0.5), [], list(range(40, 50))
    for number in range(14):
        gradient = np.full(100, 0.25, np.float32)
        gradient[again] = 0 if number else 1024
        vector, _ = take(rule, gradient, 10, number)
        sent.append(vector.indices.tolist())
        rule.observe(vector)
    # The moment is 512 after the first step, which the choice for step 1 does not know yet, and then halves. That for
    # step 13 meets 512 / 2**11, as large as the other positions' residual: the lower positions come first.
    assert [positions == again for positions in sent] == [True, False, *[True] * 11, False]


@pytest.mark.law
def test_a_change_of_the_loss_scale_changes_nothing(transport):
    size = 400
    spec = Sparse.of(0.05, "scape", collective="shared")
    pipelines = [pipeline_for(spec, size, LIKE, transport) for _ in range(2)]
    generator = np.random.default_rng(transport.rank)
    for number in range(30):
        gradient, scale = eighths(generator, size, 1000), 2.0 ** (number // 10 * 3)
        outputs = [gradient.copy(), scale * gradient]
        pipelines[0].run([(0, outputs[0])], [(0, outputs[0])], Step())
        pipelines[1].run([(0, outputs[1])], [(0, outputs[1])], Step(loss_scale=scale))
        assert everywhere(transport, np.array_equal(outputs[0] * np.float32(scale), outputs[1])), number


@pytest.mark.law
@pytest.mark.parametrize("undoable", [False, True])
def test_after_a_step_that_was_sent_in_vain_nothing_is_lost(transport, undoable):
    size, rank, ranks = 300, transport.rank, transport.size
    pipeline = pipeline_for(Sparse.of(0.1, "scape", collective="shared"), size, LIKE, transport, undoable=undoable)
    generator, balance = np.random.default_rng(rank), np.zeros(size)
    for number in range(40):
        gradient = eighths(generator, size, 1000)
        if number in (20, 21):
            gradient[7 * number % size :] = np.nan if rank == ranks - 1 else 1
        fed, output = np.nan_to_num(gradient).astype(np.float64), gradient.copy()
        pipeline.run([(0, gradient)], [(0, output)], Step())
        if number in (20, 21):
            assert everywhere(transport, np.isnan(output).any())
            if undoable:
                continue  # everything was sent: nothing is in the memory
            fed = np.zeros(size) if rank == ranks - 1 else fed
            output = np.zeros(size)
        balance += transport.allreduce(fed) - output
    held = transport.allreduce(pipeline.state_dict()["memory"]["residual"].astype(np.float64))
    assert everywhere(transport, np.array_equal(balance, held))


def test_another_number_of_ranks_continues_with_the_same_positions_and_moment():
    rules = [made(SCAPE, BucketContext(90, LIKE, rank=rank, ranks=5)) for rank in range(5)]
    earlier = made(SCAPE, 90)
    for number in range(5):
        vector, _ = take(earlier, normal(number, 90), 9, number)
        earlier.observe(vector)
    state = earlier.state_dict()
    for rule in rules:
        rule.load_state_dict(state)
        vector, _ = take(rule, normal(9, 90), 9, 5)
        assert np.array_equal(vector.indices, state["positions"])
        assert np.array_equal(rule.state_dict()["moment"], state["moment"])
        assert rule.state_dict()["moment"] is not state["moment"]
    assert SCAPE.replicated


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moment": np.zeros(89, np.float32)}, r"rank 0: moment of scape must have 90 values or none.* \(89,\)"),
        ({"positions": np.array([3, 90], np.int32)}, "positions of scape must be ascending positions from 0 to 89"),
        ({"k": -1}, "k of scape must be an integer of at least 0, not -1"),
        ({"weight": -1.0}, "weight of scape must be a number of at least 0, not -1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(changed, message):
    rule = made(SCAPE, 90)
    rule.observe(take(rule, normal(0, 90), 9)[0])
    before = rule.state_dict()
    with pytest.raises(ValueError, match=message):
        rule.load_state_dict({**before, **changed})
    assert all(rule.state_dict()[key] is value for key, value in before.items())


def test_a_moment_without_new_entries_neither_overflows_nor_disappears_at_once():
    rule = made(SCAPE, 50)
    rule.observe(SparseVector.full(np.ones(50, np.float32)))
    for _ in range(299):
        rule.observe(SparseVector.empty(50, LIKE))
    state = rule.state_dict()
    assert 1e-7 < state["weight"] <= 1
    assert state["weight"] * state["moment"] == pytest.approx(np.full(50, 0.1 * 0.9**299), rel=1e-3)
