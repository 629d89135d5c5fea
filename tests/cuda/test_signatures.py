"""CuPy takes the arguments that this package, and NumPy when it dispatches, pass to it.

The stand-in refuses others in every test that runs on it. Here, its signatures are compared with the real ones.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import devices  # before CuPy is imported
import numpy as np
import pytest
import signatures
from devices import cupy, emulated, on_device

import horovod_sparse
from horovod_sparse.collectives import COLLECTIVES
from horovod_sparse.config import Sparse
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.memories import MEMORIES
from horovod_sparse.rules import Conditions
from horovod_sparse.schedules import SCHEDULES
from horovod_sparse.sparsifiers import SPARSIFIERS
from horovod_sparse.transport.in_process import run_ranks

PACKAGE = Path(horovod_sparse.__file__).parent
only_emulated = pytest.mark.skipif(not emulated(), reason="about the stand-in")

OWNERS = ["", "ndarray", *(f"cuda.{one}" for one in ("Device", "Event", "Module", "Stream", "runtime", "nvrtc"))]
OWN = {"check_fences", "transfers"}  # of the stand-in, for tests


def offered() -> Iterator[tuple[str, str | None]]:
    """Dotted names of what the stand-in defines, and signatures of the functions."""
    owners = {"cuda": cupy.cuda, "cuda.MemoryPointer": cupy._Pointer}
    owners |= {owner: signatures.named(cupy, owner) for owner in OWNERS}
    for owner, place in owners.items():
        for name in vars(place):
            one = getattr(place, name)
            ours = getattr(one, "__module__", "cupy").startswith("cupy") and not inspect.ismodule(one)
            if name[0] != "_" and name not in OWN and ours and (owner != "cuda.nvrtc" or inspect.isfunction(one)):
                signature = str(signatures.signature_of(one)) if inspect.isfunction(one) else None
                yield f"{owner}.{name}".lstrip("."), signature


@only_emulated
def test_the_stand_in_has_the_signatures_of_cupy() -> None:
    expected = dict(offered())
    assert {"full", "add", "ndarray.sum", "cuda.Event.record", "cuda.nvrtc.createProgram"} < expected.keys()
    assert signatures.ask(signatures.differences, expected) == []


def calls() -> Iterator[tuple[str, int, list[str]]]:
    """Calls of CuPy by its name in the package: name, number of positional arguments, keywords."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            name = f"cupy.cuda.{name}" if name.startswith("nvrtc.") else name
            if isinstance(node, ast.Call) and name.startswith("cupy.") and "(" not in name:
                yield name.removeprefix("cupy."), len(node.args), [str(one.arg) for one in node.keywords]


def test_cupy_takes_the_direct_calls_of_the_package() -> None:
    found = list(calls())
    assert {"empty", "cuda.Event", "cuda.nvrtc.getCUBIN", "cuda.runtime.getDeviceCount"} < {name for name, *_ in found}
    assert signatures.ask(signatures.refused, found) == []


@only_emulated
@pytest.mark.parametrize(
    "call",
    [
        lambda x: np.full(3, 0, np.float32, like=x),  # NumPy adds device=None
        lambda x: np.ones(3, like=x),
        lambda x: np.sort(x, stable=True),
        lambda x: np.add(x, x, where=True),
        lambda x: np.add(x, x, order="C"),
        lambda x: x.sum(initial=1),
        lambda x: x.astype(np.float64, casting="unsafe"),
        lambda x: np.empty_like(x, subok=False),
        lambda x: np.median(x),
    ],
)
def test_the_stand_in_refuses_what_cupy_refuses(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError):
        call(on_device(np.ones(5, np.float32)))


@only_emulated
def test_the_stand_in_casts_as_cupy_does() -> None:
    x = on_device(np.ones(5, np.int32))
    with pytest.raises(TypeError, match="same_kind"):
        x += on_device(np.full(5, 0.5))
    assert (x + np.float32(1)).dtype == np.float64  # NumPy's scalars count, Python's do not
    assert (on_device(np.ones(2, np.float32)) + 1.5).dtype == np.float32


# Rules that need options for a bucket of any size.
OPTIONS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.5},
    "stable": {"block": 16, "refresh": 2},
    "arctopk": {"block": 16},
    "gravac": {"window": 2, "eps": 0.1},
    "momentum": {"momentum": 0.9},
    **{name: {"compressor": "quantize"} for name in ("conef", "partial", "improved")},
    "shared": {"sparsifier": "randomk"},
}
RULES = {"sparsifier": SPARSIFIERS, "memory": MEMORIES, "collective": COLLECTIVES, "schedule": SCHEDULES}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rules in RULES.items() for name in rules])
def test_every_rule_computes_on_the_device_what_it_does_on_the_host(kind: str, name: str) -> None:
    sparse = Sparse.of(0.1, **{kind: name}, **OPTIONS.get(name, {}))

    def run(transport: Any) -> None:
        put = {"host": np.asarray, "device": on_device}
        pipelines = {
            way: pipeline_for(sparse, 3000, put[way](np.empty(0, np.float32)), transport.duplicate()) for way in put
        }
        for number in range(4):
            gradient = np.random.default_rng(number).standard_normal(3000).astype(np.float32)
            outputs = {}
            for way, pipeline in pipelines.items():
                outputs[way] = put[way](np.full_like(gradient, np.nan))
                pipeline.run([(0, put[way](gradient))], [(0, outputs[way])], Conditions(epoch=number // 2))
            same = (devices.to_host(outputs["device"]) == outputs["host"]).all()
            assert same or (name == "arctopk" and not emulated())  # its matrix product is rounded differently

    run_ranks(1, run)
