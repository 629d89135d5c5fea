"""Contractive memories: the compressed error is unbiased, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from rules import NOWHERE, assert_unbiased, eighths, held, made, normal, send, some, written

from horovod_sparse.memories import Contractive, ImprovedContractive, Partial

SIZE = 400
SKETCHES = [{"saving": 0.6}, {"saving": 0.9}, {"saving": 0.6, "rows": 3}]
CODES = {"compressor": "quantize", "bits": 4}


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        *((Contractive, options) for options in (*SKETCHES, CODES)),
        (Partial, {"beta": 0.5}),
        (ImprovedContractive, {**CODES, "version": 1}),
        (ImprovedContractive, {**CODES, "version": 2}),
        (ImprovedContractive, {"version": 2}),
    ],
    ids=str,
)
def test_the_expected_residual_is_what_was_not_delivered(rule, options):
    gradient, positions, samples = normal(0, SIZE), some(np.random.default_rng(1), SIZE, 40), []
    for seed in range(300):
        memory = made(rule, SIZE, seed=seed, **options)
        _, delivered = send(memory, gradient, positions, returns=7)
        samples.append(held(memory, SIZE) / (1 - options.get("beta", 0)))
    assert_unbiased(samples, gradient - written(delivered))


@pytest.mark.parametrize(
    ("rule", "options"),
    [*((Contractive, options) for options in SKETCHES), (Partial, {"beta": 0.125}), (Partial, {"beta": 0.875})],
    ids=str,
)
def test_a_sketch_is_not_encoded_twice(rule, options):
    """While nothing is delivered, the counters are exactly those of the sum of all gradients."""
    generator, (memory, expected) = np.random.default_rng(2), (made(rule, SIZE, **options) for _ in range(2))
    gradients = [eighths(generator, SIZE) for _ in range(6)]
    for gradient in gradients:
        send(memory, gradient, NOWHERE)
    send(expected, np.sum(gradients, 0), NOWHERE)
    assert np.array_equal(memory.state_dict()["counters"], expected.state_dict()["counters"])


@pytest.mark.parametrize(("saving", "k"), [(0.6, 5), (0.6, 200), (0.95, 5), (0.95, 40), (0.95, 390)])
def test_a_sketch_stays_bounded_at_every_density(saving, k):
    generator, memory, size = np.random.default_rng(3), made(Contractive, SIZE, saving=saving), []
    for number in range(400):
        accumulated, _ = send(memory, normal(number, SIZE), some(generator, SIZE, k))
        size.append(np.linalg.norm(accumulated))
    assert np.mean(size[200:]) < 2 * np.mean(size[:200])
