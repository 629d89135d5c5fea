"""Random configurations are either refused with a ValueError on every rank, or lose nothing in training."""

from __future__ import annotations

import random
from dataclasses import Field, fields

import numpy as np
import pytest
from laws import digest, everywhere, summed
from pipelines import own, residual, run
from rules import LIKE, eighths

from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.config import Compression, Sparse, parse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.memories import MEMORIES
from horovod_sparse.schedules import SCHEDULES
from horovod_sparse.sparsifiers import SPARSIFIERS

KINDS = {"sparsifier": SPARSIFIERS, "memory": MEMORIES, "collective": COLLECTIVES, "schedule": SCHEDULES}
OPTIONS = sorted({one.name for rules in KINDS.values() for rule in rules.values() for one in fields(rule.Options)})
PRESETS = [name for name in vars(Compression) if name[0] != "_" and name not in ("none", "fp16")]
GOOD = ("1", "2", "3", "4", "8", "0.1", "0.5", "0.9", "True", "False", "float16", "quantize")
# Texts as users, scripts and accidents write them.
VALUES = (
    *GOOD,
    *("0", "64", "1.5", "2.0", "None", "-1", "-0.5", "1e-9", "1e400", "-1e400", "nan", "inf", "9" * 20, "9" * 400),
    *("10**400", "''", "'x'", "[]", "{}", "()", "b'x'", "1j", "[1, 2]", "(0.5, 0.25)", "(" * 300, "\0", "x y"),
    *("bfloat16", "sketch", "gradient", "accumulated", "topka", "gtopk", "oktopk", "dense"),
    *("0x10", "1_000", "\u0663", "...", "lambda: 0", "__import__('os')"),
)


def fields_of(settings: dict[str, str]) -> list[Field[object]]:
    """Options of the rules that are named."""
    return [one for kind, rules in KINDS.items() if kind in settings for one in fields(rules[settings[kind]].Options)]


def spec(draw: random.Random, wild: float) -> str:
    """Draw a configuration as text; a given share of its values is arbitrary."""
    settings = {kind: draw.choice(list(rules)) for kind, rules in KINDS.items() if draw.random() < 0.4}
    known = OPTIONS if draw.random() < wild else sorted({one.name for one in fields_of(settings)})
    for name in draw.sample(known, min(len(known), draw.choice((0, 1, 2, 3, 4)))):
        settings[name] = draw.choice(VALUES if draw.random() < wild else GOOD)
    settings.setdefault("density", draw.choice(("0.01", "0.3", "1", draw.choice(VALUES))))
    if draw.random() < 0.3:
        del settings["density"]
    return f"{draw.choice(PRESETS)}:" + ",".join(f"{name}={value}" for name, value in settings.items())


def read(text: str) -> Sparse | None:
    """Return the configuration, or None if it is refused; any other error is a failure."""
    try:
        return parse(text)
    except ValueError:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_a_random_text_is_read_or_refused_with_a_value_error(seed: int) -> None:
    draw = random.Random(seed)
    results = [read(spec(draw, 0.7)) for _ in range(500)]
    read_ones = [one for one in results if one is not None]
    assert 20 < len(read_ones) < 480
    assert len({hash(one) for one in read_ones}) > 10
    assert all(one.facts() for one in read_ones)


def check(transport, text: str) -> bool:
    """Train 20 steps; return whether the configuration was accepted."""
    sparse = read(text)
    if sparse is None:
        return False
    try:
        pipeline = pipeline_for(sparse, 1100, LIKE, transport)
    except ValueError:  # a sketch, say, that is larger than the bucket; on all ranks, or the others would wait
        return False
    generator, bits, fed, out = own(transport, 3), [], np.zeros(1100), np.zeros(1100)
    for number in range(20):
        gradient = eighths(generator, 1100)
        output = run(pipeline, gradient, epoch=number // 5)
        fed, out = fed + gradient, out + output
        bits.append(digest(output))
    assert everywhere(transport, transport.broadcast_object(bits) == bits), text
    if list(pipeline.state_dict().get("memory", {})) == ["residual"]:
        held = summed(transport, residual(pipeline))
        scale = summed(transport, abs(fed)) + 1
        assert everywhere(transport, (abs(out + held - summed(transport, fed)) < 1e-4 * scale).all()), text
    return True


def check_all(transport, seed: int, count: int) -> int:
    draw = random.Random(seed)
    return sum(check(transport, spec(draw, 0.15)) for _ in range(count))


@pytest.mark.slow
def test_random_configurations_train_and_lose_nothing(transport) -> None:
    assert check_all(transport, 11, 150) > 15


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_random_configurations_train_and_lose_nothing(transport, seed: int) -> None:
    assert check_all(transport, seed, 400) > 40
