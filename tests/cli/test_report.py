"""`horovod-sparse report`: the table, the differences, and self-contained files."""

from __future__ import annotations

import base64
import json
import re

import pytest

from horovod_sparse import metrics
from horovod_sparse.cli import main, plot, report
from horovod_sparse.cli.figures import draw
from horovod_sparse.cli.runs import Run, read_runs


def write_run(folder, compression, accuracies, sent, **more):
    """Write a folder like train.py's, with records of ten steps; times of record e are e times those of the first."""
    log = metrics.Log(
        folder, **{"compression": compression, "frontend": "horovod", "data": "digits", "model": "cnn", **more}
    )
    for number, accuracy in enumerate(accuracies, 1):
        statistics = {"total/steps": 10, "total/bytes_sent": 10 * sent}
        if compression != "none":
            stages = {f"total/seconds_{name}": 0.01 * number for name in ("select", "agree", "exchange", "apply")}
            hidden = {"total/seconds_hidden": 0.01 * number, "total/seconds_exposed": 0.03 * number}
            norms = {"total/residual_norm": 6.0, "total/gradient_norm": 2.0, "total/gain": 0.25}
            statistics |= {"total/trial_exposed_share": 0.6} if number == 1 else {}
            statistics |= {"total/density": 0.02, "total/ratio_to_dense": 0.04, **stages, **hidden, **norms}
        numbers = {
            "loss": 1 / number,
            "test_loss": 2 / number,
            "accuracy": accuracy,
            "samples_per_second": 100 * number,
        }
        log.write(10 * number, statistics, **numbers, seconds_forward=0.02 * number, seconds_step=0.1 * number)
    return folder


@pytest.fixture
def dense(tmp_path):
    return write_run(tmp_path / "dense", "none", [0.5, 0.8, 0.975], 1_000_000)


@pytest.fixture
def topka(tmp_path):
    return write_run(tmp_path / "topka", "topka:density=0.01", [0.4, 0.9, 0.97], 40_000)


def rows(text):
    """Cells by label of the table's rows."""
    cells = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {first: rest for first, *rest in cells}


def test_the_table_has_the_last_losses_and_medians(dense, topka):
    found = rows(report.text(read_runs([dense, topka])))
    expected = {
        "compression": ["none", "topka:density=0.01"],
        "steps": ["30", "30"],
        "loss": ["0.3333", "0.3333"],
        "accuracy": ["97.50%", "97.00%"],
        "bytes sent per step and rank": ["1,000,000", "40,000"],
        "ratio to dense": ["-", "0.04"],
        "density": ["-", "0.02"],
        "gain": ["-", "0.25"],
        "residual over gradient": ["-", "3"],
        "exchange hidden": ["-", "25%"],
        "shortest trial step, exposed": ["-", "60%"],
        "samples/s": ["200", "200"],
        "forward": ["4.00", "4.00"],
        "backward": ["-", "-"],
        "select *": ["-", "2.00"],
        "whole step": ["20.00", "20.00"],
    }
    assert found["dense"] == ["topka"]
    assert {name: found[name] for name in expected} == expected


def test_columns_are_aligned(dense, topka):
    header, line, *others = report.text(read_runs([dense, topka])).splitlines()
    full = [row for row in others if not row.startswith("time per step")]
    assert {len(row) for row in (header, line, *full)} == {len(header)}


def test_differences_are_points_against_the_dense_run_of_the_same_task(tmp_path, dense, topka):
    other = write_run(tmp_path / "other", "topka", [0.1], 1, model="vgg16")
    for order in ([dense, topka, other], [topka, other, dense]):
        assert report.differences(read_runs(order)) == {"topka": pytest.approx(-0.5)}
    assert report.differences(read_runs([topka])) == {}


def test_the_command_prints_and_writes_everything(dense, topka, tmp_path, capsys):
    output = tmp_path / "a" / "b"
    assert main(["report", str(dense), f"{topka}/", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "topka: accuracy -0.50 points against dense" in printed
    assert "2 (P-1)/P" in printed
    image = (output / "report.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    runs = json.loads((output / "report.json").read_text())
    assert runs["runs"]["topka"]["bytes sent per step and rank"] == 40_000
    assert runs["runs"]["dense"]["ms_per_step"]["select"] is None
    assert runs["accuracy_minus_dense_points"] == {"topka": pytest.approx(-0.5)}
    page = (output / "report.html").read_text()
    assert base64.b64encode(image).decode() in page
    assert not re.search(r"(src|href)=(?!\"data:)", page), "it must need no other file"
    assert page.count("<tr>") == page.count("</tr>") == 1 + len(report.table(read_runs([dense, topka]))) - 1


def test_names_and_settings_are_escaped_in_the_page():
    run = Run("<b>&", {"compression": "<script>"}, [{"step": 1, "total/steps": 1}])
    page = report.page([run], b"")
    assert "<script>" not in page
    assert "&lt;b&gt;&amp;" in page


def test_statistics_alone_are_enough(tmp_path):
    """Loss and accuracy are missing, or the loss is not positive."""
    metrics.Log(tmp_path / "a").write(1, {"total/steps": 1, "total/bytes_sent": 5, "total/density": 0.1})
    metrics.Log(tmp_path / "b").write(1, {}, loss=-1.0)
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    assert rows(report.text(runs))["density"] == ["0.1", "-"]
    assert report.differences(runs) == {}
    assert report.draw(runs)


def test_a_run_without_accuracy_and_bytes_leaves_no_empty_panel_and_no_negative_bytes(tmp_path):
    log = metrics.Log(tmp_path / "run", compression="none")
    for step in (1, 2):
        log.write(step, {"total/steps": 1, "total/bytes_sent": 0}, loss=1.0)
    loss, accuracy, *_ = draw(read_runs([tmp_path / "run"])).axes
    assert not accuracy.axison
    assert [text.get_text() for text in accuracy.texts] == ["no accuracy was logged"]
    assert loss.get_xlim()[0] >= 0


def test_missing_records_are_named(tmp_path, topka, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "nowhere"), "--output", str(tmp_path)])
    assert "nowhere/statistics.jsonl" in capsys.readouterr().err
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["report", str(topka), "--output", str(tmp_path)])
    assert "pip install 'horovod_sparse[" in capsys.readouterr().err
