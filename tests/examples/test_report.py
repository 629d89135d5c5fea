"""The comparison of runs: table, differences, files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import figures
import pytest
import report

STAGES = ("forward", "backward", "select", "agree", "exchange", "apply", "synchronize", "update", "step")


def write_run(
    folder: Path,
    compression: str,
    accuracies: list[float],
    bytes_per_step: float,
    model: str = "cnn",
    densities: dict[str, list[float]] | None = None,
    **configuration: str | bool,
) -> Path:
    """A folder as train.py would leave it; times of epoch e are e times the stage's place in STAGES."""
    epochs: list[dict[str, Any]] = [
        {
            "epoch": number,
            "train_loss": 1 / number,
            "test_loss": 2 / number,
            "test_accuracy": accuracy,
            "lr": 0.1,
            "samples_per_second": 1000.0 * number,
            "bytes_sent": 10 * number * bytes_per_step,
            "bytes_per_step": bytes_per_step,
            "ms_per_step": {stage: number * (place + 1.0) for place, stage in enumerate(STAGES)},
        }
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    folder.mkdir()
    configuration = {"data": "digits", "model": model, "compression": compression, **configuration}
    content = {"configuration": configuration, "ranks": 4, "epochs": epochs, "densities": densities or {}}
    (folder / "result.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_run(tmp_path / "dense", "none", [0.5, 0.8, 0.975], 1_000_000)


@pytest.fixture
def topka(tmp_path: Path) -> Path:
    return write_run(tmp_path / "topka", "topka:density=0.01", [0.4, 0.9, 0.97], 40_000)


WITHOUT_EPOCHS = '{"configuration": {"data": "digits", "model": "cnn", "compression": "none"}, "epochs": []}'


def rows(text: str) -> dict[str, list[str]]:
    """Cells by label of the table's rows."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {first: rest for first, *rest in cells}


def test_table_shows_the_last_epoch_and_medians(dense: Path, topka: Path) -> None:
    found = rows(report.table([report.read(dense), report.read(topka)]))
    assert found["dense"] == ["topka"]
    assert found["compression"] == ["none", "topka:density=0.01"]
    assert found["test accuracy"] == ["97.50%", "97.00%"]
    assert found["test loss"] == ["0.6667", "0.6667"]
    assert found["bytes sent per step and rank"] == ["1,000,000", "40,000"]
    assert found["samples/s"] == ["2,000", "2,000"]
    assert found["forward"] == ["2.00", "2.00"]
    assert found["backward"] == ["4.00", "4.00"]
    assert found["wait"] == ["14.00", "14.00"]
    assert found["whole step"] == ["18.00", "18.00"]


def test_stages_that_horovod_does_not_show_are_left_blank(dense: Path, topka: Path) -> None:
    found = rows(report.table([report.read(dense), report.read(topka)]))
    assert found["accumulate+select *"] == ["-", "6.00"]
    assert found["agree *"] == ["-", "8.00"]
    assert found["exchange *"] == ["-", "10.00"]
    assert found["apply *"] == ["-", "12.00"]


def test_stages_that_ddp_does_not_show_are_left_blank(tmp_path: Path, dense: Path) -> None:
    ddp = write_run(tmp_path / "ddp", "topka", [0.5], 1000, door="ddp")
    found = rows(report.table([report.read(dense), report.read(ddp)]))
    assert found["door"] == ["horovod", "ddp"]
    assert found["wait"] == ["14.00", "-"]
    assert found["exchange *"] == ["-", "5.00"]


def test_columns_are_aligned(dense: Path, topka: Path) -> None:
    header, line, *others = report.table([report.read(dense), report.read(topka)]).splitlines()
    full = [row for row in others if not row.startswith("time per step")]
    assert {len(row) for row in (header, line, *full)} == {len(header)}


def test_differences_are_points_against_dense_wherever_it_stands(dense: Path, topka: Path) -> None:
    for order in ([dense, topka], [topka, dense]):
        found = report.differences([report.read(folder) for folder in order])
        assert found == {"topka": pytest.approx(-0.5)}


def test_without_a_dense_run_there_is_no_difference(topka: Path) -> None:
    assert report.differences([report.read(topka)]) == {}


def test_runs_of_another_model_are_not_compared(tmp_path: Path, dense: Path, topka: Path) -> None:
    other = write_run(tmp_path / "other", "topka", [0.1], 1, model="vgg16")
    assert set(report.differences([report.read(folder) for folder in (dense, topka, other)])) == {"topka"}


def test_command_prints_and_writes_everything(
    dense: Path, topka: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a" / "b"
    report.main([str(dense), f"{topka}/", "--output", str(output)])
    printed = capsys.readouterr().out
    assert "topka: test accuracy -0.50 points against dense" in printed
    assert "2 (P-1)/P" in printed
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    summary = json.loads((output / "summary.json").read_text())
    assert summary["runs"]["topka"]["bytes_per_step"] == 40_000
    assert summary["runs"]["dense"]["ms_per_step"]["select"] is None
    assert summary["accuracy_minus_dense_points"] == {"topka": pytest.approx(-0.5)}


def test_runs_of_different_length_and_perfect_ones_are_drawn(tmp_path: Path, dense: Path) -> None:
    perfect = write_run(tmp_path / "perfect", "topka", [1.0], 1)
    figures.plot([report.read(dense), report.read(perfect)], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_parts_of_a_step_are_those_of_the_publication(dense: Path, topka: Path, tmp_path: Path) -> None:
    """Of a dense exchange, which shows no stages, communication is what the script waits for."""
    output = tmp_path / "report"
    report.main([str(dense), str(topka), "--output", str(output)])
    runs = json.loads((output / "summary.json").read_text())["runs"]
    steps = {"forward": 2.0, "backward": 4.0, "update": 16.0}
    assert runs["dense"]["parts_in_ms"] == {**steps, "compression": 0.0, "communication": 14.0}
    assert runs["topka"]["parts_in_ms"] == {**steps, "compression": 6.0 + 12.0, "communication": 8.0 + 10.0}
    lines = (output / "breakdown.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:4])]
    assert [dict(zip(cells[0], row, strict=True))["samples/s"] for row in cells[1:]] == ["2,000", "2,000"]
    assert dict(zip(cells[0], cells[2], strict=True)) == {
        "run": "topka",
        "--compression": "`topka:density=0.01`",
        "forward": "2.00",
        "backward": "4.00",
        "compression": "18.00",
        "communication": "18.00",
        "update": "16.00",
        "whole step": "18.00",
        "exchange": "beside backward",
        "samples/s": "2,000",
    }


def test_bars_are_stacked_in_the_order_of_the_parts(
    dense: Path, topka: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)
    runs = [report.read(dense), report.read(topka)]
    figures.plot_breakdown(runs, tmp_path / "breakdown.png")
    times, speed = plt.gcf().axes
    for number, run in enumerate(runs):
        top = 0.0
        for (part, ms), bars in zip(run.parts().items(), times.containers, strict=True):
            bar = bars[number]
            assert (bars.get_label(), bar.get_y(), bar.get_height()) == (part, top, ms)
            top += ms
    assert [bar.get_height() for bar in speed.containers[0]] == [2000, 2000]
    assert times.get_legend() is None, "it would lie over the bars"
    assert (tmp_path / "breakdown.png").stat().st_size > 10_000


def test_runs_without_overlap_say_so(tmp_path: Path, dense: Path) -> None:
    late = write_run(tmp_path / "late", "topka", [0.5], 1000, no_overlap=True)
    lines = report.breakdown([report.read(dense), report.read(late)]).splitlines()
    assert "| beside backward |" in lines[2]
    assert "| after backward |" in lines[3]


@pytest.mark.parametrize("content", [None, "", "{}", WITHOUT_EPOCHS, "[1]"])
def test_folder_without_results_is_named(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    if content is not None:
        (folder / "result.json").write_text(content)
    with pytest.raises(SystemExit, match=r"broken/result\.json holds no results .*train\.py --output"):
        report.main([str(folder), "--output", str(tmp_path)])


def test_densities_are_drawn_where_they_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steady = write_run(tmp_path / "steady", "topka", [0.5], 1000, densities={"0": [0.1, 0.1]})
    changing = write_run(tmp_path / "gravac", "gravac", [0.5], 1000, densities={"0": [0.1, 0.1], "1": [0.1, 0.05]})
    report.main([str(steady), "--output", str(tmp_path / "one")])
    assert not (tmp_path / "one" / "densities.png").exists()
    report.main([str(steady), str(changing), "--output", str(tmp_path / "two")])
    assert (tmp_path / "two" / "densities.png").stat().st_size > 5000
    assert "densities.png" in capsys.readouterr().out
