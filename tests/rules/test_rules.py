"""Types that all rules share: context, step, and copies of a state."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from rules import LIKE

from horovod_sparse.rules import BucketContext, Stateless, Step, snapshot

# --- place ---


def draw(bucket=0, rank=0, seed=0, step=0, shared=True):
    return BucketContext(10, LIKE, bucket, rank, 4).generator(seed, step, shared=shared).integers(2**60)


def test_a_shared_generator_is_the_same_on_every_rank_and_a_private_one_is_not():
    assert len({draw(rank=rank) for rank in range(4)}) == 1
    assert len({draw(rank=rank, shared=False) for rank in range(4)}) == 4


def test_seeds_buckets_and_steps_draw_differently_and_nothing_else_does():
    kinds = itertools.product(range(3), range(3), range(3), [False, True])
    draws = [draw(bucket=bucket, seed=seed, step=step, shared=shared) for bucket, seed, step, shared in kinds]
    assert len(set(draws)) == len(draws)
    assert draw(1, 2, 3, 4, shared=False) == draw(1, 2, 3, 4, shared=False)


def test_a_mean_is_the_sum_divided_by_the_world_size():
    assert BucketContext(10, LIKE, ranks=4, consensus=lambda array: array + 6).mean([2, 4.0]) == [2.0, 2.5]
    assert BucketContext(10, LIKE).mean([2, 4.0]) == [2.0, 4.0]


RESIDENT = """
import resource
from pathlib import Path
import numpy as np
from horovod_sparse.rules import BucketContext

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

context, before = BucketContext(10_000_000, np.empty(0, np.float64)), resident()
zeros = context.zeros()
print((resident() - before) / zeros.nbytes, zeros.shape, zeros.dtype, zeros.any())
"""


def test_zeros_of_the_bucket_are_resident_immediately():
    """In a process of its own: another's allocator may have resident memory of this size to reuse."""
    run = subprocess.run([sys.executable, "-c", RESIDENT], capture_output=True, text=True, timeout=60, check=True)
    share, rest = run.stdout.split(" ", 1)
    assert float(share) > 0.9
    assert rest == "(10000000,) float64 False\n"


# --- step ---


def test_the_norm_is_that_of_the_gradients_without_the_loss_scale():
    gradients = [(0, np.full(2, 3, np.float32)), (5, np.full(1, 4, np.float16))]
    assert Step(loss_scale=2.0, gradients=gradients).square_norm() == (9 + 9 + 16) / 4
    assert Step().square_norm() == 0


def test_epochs_come_from_steps_per_epoch_or_the_script_and_are_never_guessed():
    assert [Step(number=number, epoch=7).epochs(3) for number in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert Step(number=9, epoch=7).epochs(None) == 7
    with pytest.raises(RuntimeError, match=r"call optimizer.set_epoch\(epoch\).*or give the compression steps_per_"):
        Step(number=9).epochs(None)


# --- state ---


def test_a_stateless_rule_refuses_a_state():
    Stateless().load_state_dict(Stateless().state_dict())
    with pytest.raises(ValueError, match=r"Stateless has no state, .*\['step'\]"):
        Stateless().load_state_dict({"step": 1})


def state(size=3, dtype=np.float32):
    return {"step": 1, "memory": {"residual": np.arange(size, dtype=dtype), "unit": 0.5}, "seen": [[0.1, 2.0]]}


def test_a_copy_does_not_change_with_the_state_and_its_memory_is_reused():
    live = state()
    first = snapshot(live)
    array = first["memory"]["residual"]
    live["memory"]["residual"] += 7
    live["step"] = 2
    assert array.tolist() == [0, 1, 2]
    assert (first["step"], first["memory"]["unit"], first["seen"]) == (1, 0.5, [[0.1, 2.0]])
    assert snapshot(live, first)["memory"]["residual"] is array
    assert array.tolist() == [7, 8, 9]


@pytest.mark.parametrize("other", [state(size=4), state(dtype=np.float64), {"memory": {"velocity": np.ones(2)}}])
def test_an_array_of_another_size_or_dtype_gets_new_memory(other):
    copy = snapshot(other, snapshot(state()))
    for key, array in other["memory"].items():
        assert copy["memory"][key] is not array or not isinstance(array, np.ndarray)
        np.testing.assert_array_equal(copy["memory"][key], array, strict=True)
