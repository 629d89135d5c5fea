"""Place: generators that depend on seed, bucket, step and, if they shall, rank."""

from __future__ import annotations

import itertools

import numpy as np

from horovod_sparse.place import Place

LIKE = np.zeros(0, np.float32)


def draw(bucket=0, rank=0, seed=0, step=0, shared=True):
    return Place(10, LIKE, bucket, rank, 4).generator(seed, step, shared=shared).integers(2**60)


def test_a_shared_generator_is_the_same_on_every_rank_and_an_own_one_is_not():
    assert len({draw(rank=rank) for rank in range(4)}) == 1
    assert len({draw(rank=rank, shared=False) for rank in range(4)}) == 4


def test_seeds_buckets_and_steps_draw_differently():
    kinds = itertools.product(range(3), range(3), range(3), [False, True])
    draws = [draw(bucket=bucket, seed=seed, step=step, shared=shared) for bucket, seed, step, shared in kinds]
    assert len(set(draws)) == len(draws)


def test_it_depends_on_nothing_else():
    assert draw(1, 2, 3, 4, shared=False) == draw(1, 2, 3, 4, shared=False)
