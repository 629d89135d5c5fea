"""The layout of the buckets: every parameter once, in order, within the limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.engine.layout import Member, bucket_bytes_for, plan
from horovod_sparse.rules import Mode


def members(sizes, dtype=torch.float32, group=0, together=None):
    return [
        Member.of(str(i), torch.empty(size, dtype=dtype, device="meta"), group, together)
        for i, size in enumerate(sizes)
    ]


@given(sizes=st.lists(st.integers(1, 500), max_size=30), limit=st.integers(1, 3000))
def test_every_parameter_is_in_one_bucket_and_buckets_keep_the_limit(sizes, limit):
    buckets = plan(members(sizes), limit)
    segments = [segment for bucket in buckets for segment in bucket.segments]
    assert [int(segment.key) for segment in segments] == list(range(len(sizes)))
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert [one.start for one in bucket.segments] == list(
            np.cumsum([0] + [one.size for one in bucket.segments])[:-1]
        )
        assert bucket.size == sum(one.size for one in bucket.segments)
        assert bucket.size * 4 <= limit or len(bucket.segments) == 1
    for one, following in itertools.pairwise(buckets):
        assert (one.size + following.segments[0].size) * 4 > limit  # none is closed before it must be


def test_precisions_and_param_groups_do_not_share_a_bucket():
    mixed = [*members([5, 5]), *members([5], torch.float64), *members([5], torch.float16), *members([5], group=1)]
    kinds = [(bucket.dtype, bucket.group, bucket.size) for bucket in plan(mixed, 10**6)]
    assert sorted(kinds, key=str) == sorted(
        [(torch.float32, 0, 15), (torch.float64, 0, 5), (torch.float32, 1, 5)], key=str
    )


def test_a_group_is_one_bucket_of_any_size():
    together = members([100, 100, 100], together=1)
    assert [bucket.size for bucket in plan([*together, *members([100, 100])], 500)] == [300, 100, 100]


def test_buckets_are_ordered_by_completion():
    """The bucket of small parameters waits for the first layer's gradient; no other bucket waits for it."""
    layers = [*members([10]), *members([100]), *members([10]), *members([100], group=1), *members([10, 100])]
    layers = [one._replace(small=one.size == 10) for one in layers]
    kinds = [(bucket.size, bucket.group, bucket.small) for bucket in plan(layers, 10**6)]
    assert kinds == [(100, 1, False), (30, 0, True), (200, 0, False)]


@pytest.mark.parametrize(
    ("size", "mode", "mebibytes"), [(1e4, Mode.ALL, 1), (1e5, Mode.SELECT, 25), (8e6, Mode.ALL, 25)]
)
def test_dense_exchanges_start_early_and_end_with_a_small_bucket(size, mode, mebibytes):
    model = members([round(size)] * 10)
    assert bucket_bytes_for(model, mode) == mebibytes * 2**20
    assert bucket_bytes_for(members([2**20] * 16), Mode.ALL_ROUNDED) == 8 * 2**20


def test_more_elements_than_int32_counts_are_refused():
    with pytest.raises(ValueError, match=r"bucket 0 \(big.* has 2147483648 elements.* lower bucket_bytes"):
        plan([Member.of("big", torch.empty(2**31, device="meta"), 0)], 10**12)
