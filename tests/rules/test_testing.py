"""The laws that users test their rules by: the package's own rules obey them, and whatever breaks one is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from horovod_sparse.collectives import COLLECTIVES, TopkA
from horovod_sparse.memories import MEMORIES, Residual
from horovod_sparse.rules import Exchange, SparseVector
from horovod_sparse.rules.testing import check_collective, check_memory, check_schedule, check_sparsifier
from horovod_sparse.schedules import SCHEDULES, Constant
from horovod_sparse.sparsifiers import SPARSIFIERS, TopK

pytestmark = pytest.mark.law

OPTIONS = {
    "threshold": {"threshold": 2.0},
    "stable": {"block": 1, "refresh": 2},
    "multilevel": {"cf_min": 2.0},
    "hierarchical": {"node_ranks": 2},
}


@pytest.mark.parametrize("name", SPARSIFIERS)
def test_sparsifiers(transport, name):
    check_sparsifier(transport, SPARSIFIERS[name], **OPTIONS.get(name, {}))


# The others compress what they hold, drop it, or add to it.
@pytest.mark.parametrize("name", ["residual"])
def test_memories(transport, name):
    check_memory(transport, MEMORIES[name])


# What this consists of, all of them obey in tests/collectives/test_laws.py.
@pytest.mark.parametrize("name", ["topka", "oktopk"])
def test_collectives(transport, name):
    check_collective(transport, COLLECTIVES[name], **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(transport, name):
    check_schedule(transport, SCHEDULES[name], dense_steps=3)


# --- what breaks a law ---


class Loses(TopK):
    def take(self, accumulator, k, step):
        vector = super().take(accumulator, k, step)
        return replace(vector, values=vector.values * np.float32(0.5))


class Copies(TopK):
    def take(self, accumulator, k, step):
        vector = super().take(accumulator, k, step)
        accumulator.put_back(vector)
        return vector


class Unsorted(TopK):
    def take(self, accumulator, k, step):
        vector = super().take(accumulator, k, step)
        return replace(vector, indices=vector.indices[::-1].copy(), values=vector.values[::-1].copy())


class Forgets(TopK):
    """Takes one more in every step, and saves nothing of it."""

    steps = 0

    def take(self, accumulator, k, step):
        self.steps += 1
        return super().take(accumulator, k + self.steps, step)


class SharesInNameOnly(TopK):
    shares_indices = True

    def take(self, accumulator, k, step):
        return replace(super().take(accumulator, k, step), shared=True)


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (Loses, "selected entries plus the rest equal the input"),
        (Copies, "selected entries plus the rest equal the input"),
        (Copies, "selected entries leave the accumulator"),
        (Unsorted, "positions ascend"),
        (Forgets, "a restored sparsifier selects the same entries"),
        (SharesInNameOnly, "shared positions are equal on all ranks"),
    ],
)
def test_a_sparsifier_that_breaks_a_law_is_found(transport, rule, law):
    if rule is SharesInNameOnly and transport.size == 1:
        check_sparsifier(transport, rule)
        return
    with pytest.raises(AssertionError, match=f"laws violated: rank .*{law}, in Bucket"):
        check_sparsifier(transport, rule)


class Drops(Residual):
    def close(self, accumulator, vector, returned):
        super().close(accumulator, vector, returned.nothing())


class HalvesSum(Residual):
    def merge(self, states):
        return {"residual": 0.5 * super().merge(states)["residual"]}


class Amnesia(Residual):
    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (Drops, "gradients equal delivered entries plus memory; .*a failed exchange returns everything to the memory"),
        (HalvesSum, "a merged state holds the sum of the states"),
        (Amnesia, "a restored memory continues with the same numbers"),
    ],
)
def test_a_memory_that_breaks_a_law_is_found(transport, rule, law):
    with pytest.raises(AssertionError, match=law):
        check_memory(transport, rule)


class Lossy(TopkA):
    def _allreduce(self, vector, wire, k):
        exchange = super()._allreduce(vector, wire, k)
        return Exchange(exchange.total.cut(1)[0], exchange.returned)


class Alone(TopkA):
    """Gives every rank its own vector."""

    def _allreduce(self, vector, wire, k):
        return Exchange(vector, vector.nothing())


class Overwrites(TopkA):
    def allreduce(self, vector, k):
        exchange = super().allreduce(SparseVector(vector.indices, vector.values.copy(), vector.size), k)
        vector.values[:] = 0
        return exchange


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (Lossy, "total plus returned entries equal the input"),
        (Alone, "total plus returned entries equal the input"),
        (Overwrites, "the input vector is unchanged"),
    ],
)
def test_a_collective_that_breaks_a_law_is_found(transport, rule, law):
    if rule is Alone and transport.size == 1:
        check_collective(transport, rule)
        return
    with pytest.raises(AssertionError, match=f"laws violated: rank .*{law}, in Case"):
        check_collective(transport, rule)


class Rises(Constant):
    weighs = True

    def densities(self, step):
        return (0.1, 0.2)


class ByRank(Constant):
    def __init__(self, context, density, options):
        super().__init__(context, density / (1 + context.rank), options)


class Counts(Constant):
    steps = 0

    def densities(self, step):
        self.steps += 1
        return (1 / self.steps,)


@pytest.mark.parametrize(
    ("rule", "law"),
    [
        (Rises, "densities descend"),
        (ByRank, "densities are equal on all ranks"),
        (Counts, "a restored schedule returns the same densities, in step 1"),
    ],
)
def test_a_schedule_that_breaks_a_law_is_found(transport, rule, law):
    if rule is ByRank and transport.size == 1:
        check_schedule(transport, rule)
        return
    with pytest.raises(AssertionError, match=law):
        check_schedule(transport, rule)
