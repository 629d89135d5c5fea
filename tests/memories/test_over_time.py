"""The law of every memory over hundreds of steps: what is fed in is delivered or still held, and nothing grows.

Three numbers show this: the shares that were delivered and that are held, along the direction of the signal, and the
norm of the accumulator, late over early. A sketch reads each element with a noise as large as itself, and is right in
expectation: over its hashes, the shares have a standard deviation of sqrt(2 / w).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import product

import numpy as np
import pytest
from rules import LIKE, held, made

from horovod_sparse.memories import MEMORIES
from horovod_sparse.memories.compressed import CompressedOptions
from horovod_sparse.rules import BucketContext, Step
from horovod_sparse.sparsifiers import SPARSIFIERS

SIZE, DENSITY, STEPS = 16_384, 0.1, 500
SKETCHES = [{"saving": 0.05}, {"saving": 0.4}, {"saving": 0.6}, {"saving": 0.9}, {"rows": 3}, {"rows": 5}]
CODES = [{"compressor": "quantize", "bits": bits} for bits in (8, 4)]
OPTIONS = {
    "residual": [{}],
    "none": [{}],
    "conef": [*SKETCHES, *CODES, {"compressor": "quantize", "bits": 16}],
    "partial": [{**one, "beta": beta} for one in SKETCHES + CODES for beta in (0.1, 0.5, 0.9)],
    "improved": [{**one, "version": 2} for one in SKETCHES + CODES] + [{**one, "version": 1} for one in CODES],
    "momentum": [
        {"momentum": 0.9, "fresh": fresh, "masking": masking} for fresh in (0.0, 0.1, 0.4) for masking in (False, True)
    ],
}
# Of the compressors; of the others, CI takes every ninth case.
QUICK = [{"saving": 0.6}, {"saving": 0.9}, {"compressor": "quantize", "bits": 4}]


@dataclass
class Account:
    """Sums of the gradients that a memory got and of what it delivered, and the norms of its accumulators."""

    along: np.ndarray  # the direction in which shares are measured, which knows nothing of a sketch's hash
    fed: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    delivered: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    held: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    norms: list[float] = field(default_factory=list)

    def share(self, part):
        return part @ self.along / (self.fed @ self.along)

    @property
    def growth(self):
        half = len(self.norms) // 2
        return np.mean(self.norms[half:]) / np.mean(self.norms[:half])


@cache
def signal(kind):
    """Gradients to go round and round: the same one, one under four times as much noise, one of many magnitudes."""
    generator = np.random.default_rng(1)
    direction = generator.standard_normal(SIZE)
    if kind == "mixture":
        direction *= np.exp(generator.standard_normal(SIZE))
    noise = 4 * generator.standard_normal((61, SIZE)) if kind == "noisy" else np.zeros((1, SIZE))
    return (direction + noise).astype(np.float32)


def momentum_of(options):
    """Return what momentum makes of a gradient, without masking, and with masking where an entry was sent."""
    velocity, m = np.zeros(SIZE), 0.9

    def fed(gradient, sent):
        if options["masking"]:
            velocity[sent] = 0
        velocity[:] = m * velocity + gradient
        return (1 - options["fresh"]) * velocity + options["fresh"] / (1 - m) * gradient

    return fed


def account(name, options, sparsifier, kind):
    """Run a memory for hundreds of steps."""
    memory = made(MEMORIES[name], BucketContext(SIZE, LIKE), **options)
    chooser = made(SPARSIFIERS[sparsifier], BucketContext(SIZE, LIKE))
    filtered = momentum_of(options) if name == "momentum" else lambda gradient, sent: gradient
    result, sent = Account(signal(kind).sum(0, dtype=float)), np.empty(0, np.int32)
    for number in range(STEPS):
        gradient = signal(kind)[number % len(signal(kind))]
        accumulator = memory.open(Step(number=number, gradients=[(0, gradient)]), 1.0)
        result.norms.append(np.linalg.norm(accumulator.settle()))
        vector = chooser.take(accumulator, round(DENSITY * SIZE), Step(number=number))
        memory.close(accumulator, vector, vector.nothing())
        result.fed += filtered(gradient, sent)
        sent, values = vector.entries
        result.delivered[sent] += values
    result.fed += filtered(0.0, sent)  # as the memory is opened once more, with nothing
    result.held = held(memory, SIZE) / (1 - options.get("beta", 0.0))
    return result


@cache
def of_error_feedback(sparsifier, kind):
    return account("residual", {}, sparsifier, kind)


def tolerance(options):
    """Return the tolerance of shares: three standard deviations over hashes plus the loss of a median, or rounding."""
    compressor = CompressedOptions.read(options)
    if compressor.compressor == "quantize":
        return 0.01
    return 3 * np.sqrt(2 / ((1 - compressor.saving) * SIZE)) + (0.04 if compressor.rows > 1 else 0)


def is_compressed(name):
    return issubclass(MEMORIES[name].Options, CompressedOptions)


def is_sketch(name, options):
    return is_compressed(name) and options.get("compressor") != "quantize"


def is_quick(name, options, sparsifier, kind):
    stationary = "randomblock" if is_sketch(name, options) else "topk"
    compressor = {key: value for key, value in options.items() if key not in ("beta", "version")}
    chosen = options.get("masking", True) and options.get("beta", 0.5) == 0.5
    chosen = chosen and (compressor in QUICK or not is_compressed(name))
    return chosen and (sparsifier, kind) in ((stationary, "stationary"), ("randomblock", "noisy"))


def marks_of(number, *case):
    if is_quick(*case):
        return []
    return pytest.mark.nightly if number % 9 else pytest.mark.full


def cases(compressed):
    """Memory, options, sparsifier and signal; sketches with random positions only, as configurations require it."""
    every_case = [
        case
        for name, every in OPTIONS.items()
        for case in product([name], every, ["topk", "randomk", "randomblock"], ["stationary", "noisy", "mixture"])
        if name != "none" and is_compressed(name) == compressed and not (is_sketch(*case[:2]) and case[2] == "topk")
    ]
    return [
        pytest.param(*case, marks=marks_of(number, *case), id="-".join(map(str, case)))
        for number, case in enumerate(every_case)
    ]


def test_every_memory_is_tested():
    assert OPTIONS.keys() >= MEMORIES.keys()


@pytest.mark.parametrize(("name", "options", "sparsifier", "kind"), cases(compressed=False))
def test_nothing_is_lost_and_nothing_grows(name, options, sparsifier, kind):
    one, plain = account(name, options, sparsifier, kind), of_error_feedback(sparsifier, kind)
    assert np.linalg.norm(one.delivered + one.held - one.fed) < 1e-5 * np.linalg.norm(one.fed)
    assert plain.share(plain.delivered) - 0.05 < one.share(one.delivered) < 1.01
    assert one.growth < 2


@pytest.mark.parametrize(("name", "options", "sparsifier", "kind"), cases(compressed=True))
def test_a_compressed_error_is_delivered_like_a_full_one(name, options, sparsifier, kind):
    one, plain = account(name, options, sparsifier, kind), of_error_feedback(sparsifier, kind)
    error, waits = tolerance(options), 3 / (1 - options["beta"]) if "beta" in options else 1
    delivered, held, of_plain = one.share(one.delivered), one.share(one.held), plain.share(plain.delivered)
    assert abs(delivered + held - 1) < error
    assert 1 - waits * (1 - of_plain) - error < delivered < of_plain + error
    assert one.growth < 2


def test_without_memory_random_positions_deliver_the_density():
    one = account("none", {}, "randomk", "noisy")
    assert not one.held.any()
    assert abs(one.share(one.delivered) - DENSITY) < 0.01
    assert one.growth < 1.01
