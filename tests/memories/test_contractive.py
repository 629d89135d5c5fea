"""Contractive: the error, compressed; right in expectation, and never lost."""

from __future__ import annotations

import numpy as np
import pytest
from memories.errors import LIKE, block, built, eighths, held, step

from horovod_sparse.kernels import cpu
from horovod_sparse.memories import Contractive, Residual
from horovod_sparse.memories.countsketch import CountSketch
from horovod_sparse.place import Place

SIZE = 400
COMPRESSORS = [{"saving": 0.6}, {"saving": 0.9}, {"saving": 0.6, "rows": 3}, {"compressor": "quantize"}]


@pytest.mark.parametrize("options", [*COMPRESSORS, {"compressor": "quantize", "bits": 4}], ids=str)
def test_in_expectation_what_is_held_is_what_was_not_delivered(options):
    """Over 600 seeds: e' = p - D, to five of the largest standard errors of an element's mean."""
    gradient = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    positions = block(np.random.default_rng(1), SIZE, 40)
    samples = []
    for seed in range(600):
        memory = built(Contractive, SIZE, seed=seed, **options)
        _, delivered = step(memory, gradient, positions, returns=7)
        samples.append(held(memory, SIZE))
    error = np.std(samples, 0, ddof=1).max() / np.sqrt(len(samples))
    assert np.abs(np.mean(samples, 0) - (gradient - delivered)).max() <= 5 * error


def test_the_error_of_a_sketch_of_one_row_is_within_its_bound():
    """E ||C(x) - x||^2 <= n/w ||x||^2, and not far below it: a bound that is never reached would show nothing."""
    x = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    squares = []
    for seed in range(400):
        sketch = CountSketch(Place(SIZE, LIKE), 0.6, 1, seed, 0)
        sketch.update(x.copy(), np.empty(0, np.int32), 0.0)
        decoded = np.empty(SIZE, np.float32)
        sketch.decode(decoded, 1.0)
        squares.append(np.square(decoded - x).sum() / np.square(x).sum())
    width = cpu.sketch_length(SIZE, 0.4, 1)
    assert 0.5 * SIZE / width < np.mean(squares) <= SIZE / width


@pytest.mark.parametrize("options", COMPRESSORS[:3], ids=str)
def test_a_sketch_is_not_encoded_twice(options):
    """Exactly: while nothing is delivered, the counters are those of the sum of all gradients."""
    generator, memory = np.random.default_rng(2), built(Contractive, SIZE, **options)
    owed, nothing = np.zeros(SIZE, np.float32), np.empty(0, np.int32)
    for _ in range(6):
        gradient = eighths(generator, SIZE)
        step(memory, gradient, nothing)
        owed += gradient
    expected = built(Contractive, SIZE, **options)
    step(expected, owed, nothing)
    assert np.array_equal(memory.state_dict()["counters"], expected.state_dict()["counters"])


@pytest.mark.parametrize(("saving", "k"), [(0.6, 5), (0.6, 200), (0.95, 5), (0.95, 40), (0.95, 390)])
def test_a_sketch_stays_bounded_at_every_density(saving, k):
    generator, memory, size = np.random.default_rng(3), built(Contractive, SIZE, saving=saving), []
    for _ in range(600):
        accumulated, _ = step(memory, generator.standard_normal(SIZE).astype(np.float32), block(generator, SIZE, k))
        size.append(np.linalg.norm(accumulated))
    assert np.mean(size[300:]) < 2 * np.mean(size[:300])


def test_a_block_that_is_sent_takes_its_error_with_it():
    """Sections of the sketch are stretches of the bucket: blocks of their size leave nothing behind, and no noise."""
    size = 4 * 16_384
    generator, memory = np.random.default_rng(4), built(Contractive, size, saving=0.9)
    for section in (0, 1, 2, 3):
        positions = np.arange(section * 16_384, (section + 1) * 16_384, dtype=np.int32)
        step(memory, generator.standard_normal(size).astype(np.float32), positions)
        assert np.abs(held(memory, size)[positions]).max() < 1e-4


def test_it_takes_the_memory_it_says():
    for saving in (0.6, 0.9):
        size = 200_000
        residual = built(Residual, size).state_dict()["residual"].nbytes
        assert built(Contractive, size, saving=saving).state_dict()["counters"].nbytes <= (1 - saving + 0.01) * residual
    state = built(Contractive, size, compressor="quantize", bits=4).state_dict()
    assert state["codes"].nbytes + state["scales"].nbytes <= 0.15 * residual


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("options", COMPRESSORS, ids=str)
def test_a_failed_exchange_gives_everything_back(options, whole):
    memory, untouched = (built(Contractive, SIZE, **options) for _ in range(2))
    gradient = eighths(np.random.default_rng(4), SIZE)
    accumulator = memory.open([(0, gradient)], 1.0)
    vector = accumulator.take_all() if whole else accumulator.take_largest(50)
    memory.close(accumulator, vector, vector)
    step(untouched, gradient, np.empty(0, np.int32))
    assert np.array_equal(held(memory, SIZE), held(untouched, SIZE))


def test_a_dense_step_leaves_nothing_behind():
    for options in COMPRESSORS:
        memory = built(Contractive, SIZE, **options)
        for _ in range(3):
            accumulator = memory.open([(0, eighths(np.random.default_rng(5), SIZE))], 1.0)
            vector = accumulator.take_all()
            memory.close(accumulator, vector, vector.nothing())
        assert np.abs(held(memory, SIZE)).max() < 1e-4


@pytest.mark.parametrize("options", COMPRESSORS, ids=str)
def test_a_new_unit_rescales_what_is_held(options):
    generator = np.random.default_rng(6)
    gradient, nothing = eighths(generator, SIZE), np.empty(0, np.int32)
    one, other = (built(Contractive, SIZE, **options) for _ in range(2))
    for memory in (one, other):
        step(memory, gradient, nothing)
    before = held(one, SIZE)
    accumulated, _ = step(one, np.zeros(SIZE, np.float32), nothing, scale=0.5)
    assert np.array_equal(accumulated, before / 2)


@pytest.mark.parametrize("options", COMPRESSORS, ids=str)
def test_a_restored_one_goes_on(options):
    one, other = (built(Contractive, SIZE, **options) for _ in range(2))
    generator = np.random.default_rng(7)
    for _ in range(3):
        step(one, generator.standard_normal(SIZE).astype(np.float32), block(generator, SIZE, 40))
    other.load_state_dict(one.state_dict())
    gradient, positions = generator.standard_normal(SIZE).astype(np.float32), block(generator, SIZE, 40)
    for _ in range(2):
        pair = [step(memory, gradient, positions) for memory in (one, other)]
        assert all(map(np.array_equal, *pair))


def test_a_state_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit one of shape"):
        built(Contractive, SIZE).load_state_dict(built(Contractive, 2 * SIZE).state_dict())
    codes = built(Contractive, 2 * SIZE, compressor="quantize").state_dict()
    with pytest.raises(ValueError, match="codes do not fit"):
        built(Contractive, SIZE, compressor="quantize").load_state_dict(codes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "zip"}, "unknown error compressor 'zip'; known are: sketch, quantize"),
        ({"saving": 0.0}, r"saving must be in \(0, 1\), not 0.0: .* larger than the residual saves nothing"),
        ({"saving": 1.0}, r"saving must be in \(0, 1\), not 1.0"),
        ({"rows": 2}, "rows must be 1, 3 or 5, not 2"),
        ({"compressor": "quantize", "bits": 3}, "bits must be 4 or 8, not 3"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        built(Contractive, SIZE, **options)


def test_a_sketch_that_would_be_larger_than_the_residual_is_refused():
    with pytest.raises(
        ValueError, match="rank 2: a sketch of 16 counters is larger than the residual of bucket 5 with"
    ):
        Contractive(Place(10, LIKE, bucket=5, rank=2, ranks=4))
