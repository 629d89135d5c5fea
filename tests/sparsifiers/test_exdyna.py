"""ExDyna: parts exchange blocks until all select about the same number of entries."""

from __future__ import annotations

import numpy as np
import pytest
from laws import everywhere, same_bits
from pipelines import run
from rules import LIKE, made, normal, take

from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.rules import BucketContext
from horovod_sparse.sparsifiers import ExDyna
from horovod_sparse.vector import SparseVector


def parts_of(rule):
    return rule.state_dict()["parts"].tolist()


def rule_of(ranks, size=1600, rank=0, **options):
    return made(ExDyna, BucketContext(size, LIKE, rank=rank, ranks=ranks), **options)


def total_at(positions, size=1600):
    return SparseVector(np.array(positions, np.int32), np.ones(len(positions), np.float32), size, shared=True)


def spread_over(counts, size=1600):
    """A total with these numbers of entries in equal parts of the bucket."""
    width = size // len(counts)
    return total_at([part * width + i for part, count in enumerate(counts) for i in range(count)], size)


@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ([100, 100, 100, 100], [0, 4, 8, 12, 16]),
        ([104, 96, 100, 100], [0, 4, 8, 12, 16]),
        ([106, 94, 100, 100], [0, 3, 8, 12, 16]),
        ([94, 106, 100, 100], [0, 5, 8, 12, 16]),
        ([106, 96, 98, 100], [0, 4, 8, 12, 16]),
        ([50, 150, 150, 50], [0, 5, 8, 11, 16]),
        # Part 1 has enough after what part 0 gave it, by estimate, and part 2 finds no taker.
        ([180, 90, 120, 10], [0, 3, 8, 11, 16]),
    ],
)
def test_a_block_moves_from_a_part_with_many_entries_to_a_neighbour_with_few(counts, parts):
    rule = rule_of(4, blocks=16)
    rule.observe(spread_over(counts))
    assert parts_of(rule) == parts


def test_a_part_keeps_a_quarter_of_its_share():
    rule = rule_of(2, blocks=16)
    for _ in range(20):
        rule.observe(total_at(range(100)))
    assert parts_of(rule) == [0, 2, 16]


@pytest.mark.parametrize(("size", "blocks", "ranks"), [(1600, 16, 3), (1601, 1024, 4), (10, 1024, 5), (1600, 2, 4)])
def test_the_parts_always_cover_the_bucket(size, blocks, ranks):
    rules, gradient = [rule_of(ranks, size, rank, blocks=blocks) for rank in range(ranks)], normal(1, size)
    for number in range(30):
        taken = [take(rule, gradient, size // 2, number)[0] for rule in rules]
        assert len({position for vector in taken for position in vector.indices}) == sum(map(len, taken))
        for rule in rules:
            rule.observe(total_at(range(size // 3), size))
            parts, boundaries = parts_of(rule), rule._boundaries()
            assert (parts[0], parts[-1], boundaries[0], boundaries[-1]) == (0, blocks, 0, size)
            assert sorted(parts) == parts == parts_of(rules[0])


@pytest.mark.law
def test_ranks_converge_to_similar_numbers_of_entries(transport):
    """Magnitudes are ten times as large in the first eighth of the bucket."""
    size, ranks = 16_000, transport.size
    spec = Sparse.of(0.1, sparsifier="exdyna", collective="union", blocks=128)
    pipeline, taken = pipeline_for(spec, size, LIKE, transport), []
    take_ = pipeline.rules.sparsifier.take
    pipeline.rules.sparsifier.take = lambda *given: taken.append(take_(*given)) or taken[-1]
    generator = np.random.default_rng(transport.rank)
    for _ in range(150):
        gradient = generator.standard_normal(size).astype(np.float32)
        gradient[: size // 8] *= 3
        assert same_bits(transport, run(pipeline, gradient), pipeline.rules.sparsifier.state_dict()["parts"])
    counts = np.array(transport.allgather_object([len(vector) for vector in taken]))
    excess = counts.max(0) / np.maximum(counts.mean(0), 1) - 1
    early, late = excess[2:10].mean(), excess[-30:].mean()
    assert everywhere(transport, ranks == 1 or 0.2 < early > 2 * late), (early, late)


@pytest.mark.parametrize("parts", [[0, 16], [0, 8, 15], [0, 9, 8], [1, 8, 16]])
def test_parts_of_another_number_of_ranks_or_blocks_are_refused(parts):
    rule = rule_of(2, blocks=16)
    state = {**rule.state_dict(), "parts": np.array(parts)}
    with pytest.raises(ValueError, match=r"rank 0: parts of exdyna must be 3 ascending .*same number of ranks"):
        rule.load_state_dict(state)
    assert parts_of(rule) == [0, 8, 16]


def test_a_loaded_rule_selects_in_the_same_parts():
    rule, other = rule_of(2, blocks=16), rule_of(2, blocks=16)
    take(rule, normal(0, 1600), 100)
    rule.observe(spread_over([150, 50]))
    other.load_state_dict(rule.state_dict())
    for one in (rule, other):
        one.observe(spread_over([150, 50]))
    assert parts_of(rule) == parts_of(other) == [0, 6, 16]
    assert rule.state_dict()["threshold"] == other.state_dict()["threshold"]
