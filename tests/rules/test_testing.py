"""The law tests for users: the package's own rules pass, and broken rules fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from horovod_sparse.collectives import COLLECTIVES, TopkA
from horovod_sparse.memories import Residual
from horovod_sparse.rules import Reduced, SparseVector
from horovod_sparse.rules.testing import check_collective, check_memory, check_schedule, check_sparsifier
from horovod_sparse.schedules import SCHEDULES, Constant
from horovod_sparse.sparsifiers import SPARSIFIERS, TopK

pytestmark = pytest.mark.law

OPTIONS = {
    "threshold": {"threshold": 2.0},
    "stable": {"block": 1, "refresh": 2},
    "arctopk": {"block": 1, "refresh": 2},
    "multilevel": {"cf_min": 2.0},
    "hierarchical": {"node_ranks": 2},
}


@pytest.mark.parametrize(
    ("check", "name", "rule"),
    [
        *((check_sparsifier, *item) for item in SPARSIFIERS.items()),
        # The other memories compress what they hold, drop it, or add to it.
        (check_memory, "residual", Residual),
        # What check_collective consists of, all of them obey in tests/collectives/test_laws.py.
        *((check_collective, name, COLLECTIVES[name]) for name in ("topka", "oktopk", "union")),
        *((check_schedule, *item) for item in SCHEDULES.items()),
    ],
)
def test_the_rules_of_the_package_obey_the_laws(transport, check, name, rule):
    check(transport, rule, **OPTIONS.get(name, {"dense_steps": 3} if name in SCHEDULES else {}))


# --- what breaks a law ---


class Loses(TopK):
    def take(self, accumulator, k, step):
        vector = super().take(accumulator, k, step)
        return replace(vector, values=vector.values * np.float32(0.5))


class LosesInLaterLayers(TopK):
    def __init__(self, context, options):
        super().__init__(context, options)
        self._second = [*context.layers, context.size][1]

    def take(self, accumulator, k, step):
        vector = super().take(accumulator, k, step)
        return replace(vector, values=np.where(vector.indices < self._second, vector.values, np.float32(0)))


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
    """Rule that takes one more entry in every step, and does not save the count."""

    steps = 0

    def take(self, accumulator, k, step):
        self.steps += 1
        return super().take(accumulator, k + self.steps, step)


class SharesInNameOnly(TopK):
    shares_indices = True

    def take(self, accumulator, k, step):
        return replace(super().take(accumulator, k, step), shared=True)


class Drops(Residual):
    def close(self, accumulator, vector, returned):
        super().close(accumulator, vector, returned.nothing())


class HalvesSum(Residual):
    def merge(self, states):
        return {"residual": 0.5 * super().merge(states)["residual"]}


class Amnesia(Residual):
    def load_state_dict(self, state):
        pass


class Lossy(TopkA):
    def _allreduce(self, vector, wire, k):
        reduced = super()._allreduce(vector, wire, k)
        return Reduced(reduced.total.cut(1)[0], reduced.returned)


class Alone(TopkA):
    """Collective that returns every rank its own vector."""

    def _allreduce(self, vector, wire, k):
        return Reduced(vector, vector.nothing())


class Overwrites(TopkA):
    def allreduce(self, vector, k):
        reduced = super().allreduce(SparseVector(vector.indices, vector.values.copy(), vector.size), k)
        vector.values[:] = 0
        return reduced


class Duplicates(TopkA):
    """Rule that sends entries without removing them from the accumulator."""

    def extend(self, accumulator, vector, k):
        return vector.plus(SparseVector.full(accumulator.buffer.copy()))


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
    ("check", "rule", "law"),
    [
        (check_sparsifier, Loses, "selected entries plus the rest equal the input, in Bucket"),
        (check_sparsifier, LosesInLaterLayers, r"the rest equal the input, in Bucket.*layers=\(0, 1, 120, 290\)"),
        (check_sparsifier, Copies, "selected entries plus the rest equal the input, in Bucket"),
        (check_sparsifier, Copies, "selected entries leave the accumulator, in Bucket"),
        (check_sparsifier, Unsorted, "positions ascend, in Bucket"),
        (check_sparsifier, Forgets, "a restored sparsifier selects the same entries, in Bucket"),
        (check_sparsifier, SharesInNameOnly, "shared positions are equal on all ranks, in Bucket"),
        (check_memory, Drops, "gradients equal delivered entries plus memory; .*a failed exchange returns everything"),
        (check_memory, HalvesSum, "a merged state holds the sum of the states"),
        (check_memory, Amnesia, "a restored memory continues with the same numbers"),
        (check_collective, Lossy, "total plus returned entries equal the input, in Case"),
        (check_collective, Alone, "total plus returned entries equal the input, in Case"),
        (check_collective, Duplicates, "the extended vector plus the rest equal the accumulator, in Case"),
        (check_collective, Overwrites, "the input vector is unchanged, in Case"),
        (check_schedule, Rises, "densities descend"),
        (check_schedule, ByRank, "densities are equal on all ranks"),
        (check_schedule, Counts, "a restored schedule returns the same densities, in step 1"),
    ],
)
def test_a_rule_that_breaks_a_law_is_detected(transport, check, rule, law):
    if rule in (SharesInNameOnly, Alone, ByRank) and transport.size == 1:
        check(transport, rule)
        return
    with pytest.raises(AssertionError, match=f"laws violated: rank .*{law}"):
        check(transport, rule)
