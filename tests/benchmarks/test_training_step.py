"""benchmarks.training_step measures whole steps on any number of ranks, and draws their parts."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.training_step import figure
from benchmarks.training_step.__main__ import parse_arguments
from benchmarks.training_step.exchange import CONTENDERS
from benchmarks.training_step.measure import PARTS, measure
from horovod_sparse.transport.in_process import run_ranks

pytestmark = pytest.mark.full

SMALL = ("-m", "benchmarks.training_step", "--model", "cnn", "--batch", "4", "--density", "0.01", "--steps", "3")


def content_of(output: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return {**lines[0], "contenders": {line["contender"]: line for line in lines}}


def run(*arguments: str, output: Path, **launcher: Any) -> dict[str, Any]:
    """Run the benchmark on the CNN and return its results."""
    done = launch.python(*SMALL, "--warmup", "1", "--output", str(output), *arguments, **launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{name} " in done.stdout for name in CONTENDERS)
    return content_of(output)


def check(content: dict[str, Any], ranks: int) -> None:
    """Assert that all contenders have the parts that they must have, and have sent what they must send."""
    assert content["ranks"] == ranks
    assert {"cpu", "torch"} <= set(content["machine"])
    found = content["contenders"]
    assert list(found) == list(CONTENDERS)
    for name, contender in found.items():
        ms = {part: spread[0] for part, spread in contender["ms"].items()}
        assert all(ms[part] > 0 for part in ("step", "forward", "backward", "update"))
        assert (ms["compression"] > 0) == (name != "alone")
        assert (contender["kilobytes_sent"] > 0) == (ranks > 1 and name != "alone")
    if ranks > 1:
        assert found["ours"]["kilobytes_sent"] < 0.05 * found["dense"]["kilobytes_sent"]
        assert found["ours"]["ms"]["communication"][0] > 0


def misplaced(drawing: Figure) -> list[str]:
    """Return the texts of a figure that touch another one or leave the figure, except for numbers of an axis."""
    drawing.draw_without_rendering()  # lays out
    texts = [text for text in drawing.findobj(Text) if text.get_text() and text.get_visible()]
    texts = [text for text in texts if not (type(text) is Text and text.get_text().replace(".", "").isdigit())]
    boxes = [text.get_window_extent() for text in texts]
    pairs = itertools.combinations(range(len(texts)), 2)
    touching = [texts[one].get_text() for one, other in pairs if boxes[one].overlaps(boxes[other])]
    page = drawing.bbox
    outside = [
        text.get_text()
        for text, box in zip(texts, boxes, strict=True)
        if not (page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1))
    ]
    return touching + outside


def test_one_and_two_ranks_are_measured_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    results = [run(output=files[0]), run(output=files[1], ranks=2)]
    for ranks, content in enumerate(results, 1):
        check(content, ranks)
        for contender in content["contenders"].values():
            assert contender["ms"]["rest"][1] > 0, "parts exceed the step"
    monkeypatch.setattr(sys, "argv", ["figure", *map(str, files), "--output", str(tmp_path / "step")])
    assert figure.main() == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "step.svg").read_text()
    assert not misplaced(figure.draw(results))
    assert not misplaced(figure.draw(results[:1]))
    assert not capsys.readouterr().err


@pytest.mark.nightly
def test_ranks_of_torchrun_overlap_the_exchange_but_have_no_figure(tmp_path: Path) -> None:
    output = tmp_path / "2.jsonl"
    content = run("--overlap", output=output, ranks=2, torchrun=())
    check(content, 2)
    assert "rest" not in content["contenders"]["ours"]["ms"]
    with pytest.raises(ValueError, match=r"2.jsonl was measured with --overlap: its parts do not add up"):
        figure.load(output)


def test_bars_are_as_high_as_the_step() -> None:
    ms = dict.fromkeys(PARTS, (2.0, 1.0, 3.0)) | {"step": (12.0, 11.0, 13.0)}
    bars = figure.measured({"contenders": {"ours": {"ms": ms}, "alone": {"ms": ms}}})
    assert list(bars) == ["Top-k, ours", "alone"]
    assert bars["alone"] == {**dict.fromkeys(PARTS, 2.0), "rest": 2.0}
    step = {name: sum(parts.values()) for name, parts in figure.published().items()}
    assert step == pytest.approx({"dense": 58.89, "Random-k": 65.44, "Top-k by sorting": 274.97}, abs=0.01)


@pytest.mark.parametrize(
    ("contender", "message"),
    [("topk:density=0.01", "unknown compression 'topk'"), ("none", "none is a compression of Horovod")],
)
def test_an_unknown_contender_is_refused(
    contender: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["training_step", "--contenders", "alone", contender])
    with pytest.raises(SystemExit, match="2"):
        parse_arguments()
    assert message in capsys.readouterr().err


def test_a_language_model_is_measured_in_mixed_precision() -> None:
    options = {"model": "tiny", "batch": 2, "length": 16, "density": 0.01, "device": "cpu", "overlap": True}
    settings: Any = SimpleNamespace(**options, steps=2, warmup=1)
    (found,) = run_ranks(1, lambda transport: measure(settings, transport, "recommended"))
    assert all(found.ms[part][0] > 0 for part in ("step", "forward", "backward", "compression", "update"))
