"""GPT-2 with simulated ranks: every exchange trains, and pieces make the same run as one invocation."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from states import same

from benchmarks.gpt2 import training as module
from benchmarks.gpt2.__main__ import main
from benchmarks.gpt2.model import build
from benchmarks.gpt2.text import BYTES, Text
from benchmarks.gpt2.training import CHECKPOINT, RECORDS, Data, Settings, Training

pytestmark = pytest.mark.full
nightly = partial(pytest.param, marks=pytest.mark.nightly)

RECOMMENDED, POWERSGD = "recommended:density=0.05", "powersgd:rank=2"
WORDS = ["residual", "momentum", "bucket", "gradient", "rank", "sparse", "density"]


def words(count: int, seed: int) -> torch.Tensor:
    chosen = random.Random(seed).choices(WORDS, k=count)
    return torch.tensor(list(" ".join(chosen).encode()), dtype=torch.int32)


TEXT = Text(words(8000, 0), words(600, 1), BYTES, 0.1)


def settings(exchange: str, steps: int = 20, lr: float = 4e-3, **changes: object) -> Settings:
    kept = {"model": "tiny", "ranks": 3, "sequences": 2, "every": 5, "seed": 0, "device": "cpu"}
    return Settings(exchange=exchange, steps=steps, lr=lr, **{**kept, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _one_core():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def records(folder: Path) -> list[dict[str, float]]:
    points = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    return [{key: point[key] for key in point if key != "seconds"} for point in points]


def checkpoint(folder: Path) -> dict[str, object]:
    return torch.load(folder / CHECKPOINT, weights_only=True)


def trained(folder: Path, exchange: str, **changes: object) -> list[torch.Tensor]:
    folder.mkdir()
    Training(settings(exchange, **changes), TEXT, folder).run()
    return list(checkpoint(folder)["model"].values())


@pytest.mark.parametrize(
    "exchange", [RECOMMENDED, *map(nightly, ("dense", "none", "recommended:density=0.01", POWERSGD))]
)
def test_every_exchange_trains(tmp_path, exchange):
    trained(tmp_path / "run", exchange, steps=60)
    first, *_, last = records(tmp_path / "run")
    assert last["held_out_loss"] < 2.8 < 3 < first["held_out_loss"]
    assert last["tokens"] == 60 * 3 * 2 * 64


def test_bytes_are_those_of_the_exchange(tmp_path):
    size = sum(parameter.numel() for parameter in build("tiny").parameters())
    sent = {}
    for exchange in ("none", "dense", "recommended:density=0.01", POWERSGD):
        trained(tmp_path / exchange, exchange, steps=15)
        points = {point["step"]: point["bytes_sent"] for point in records(tmp_path / exchange)}
        sent[exchange] = (points[15] - points[10]) / 5
    assert sent["none"] == pytest.approx(2 * 2 / 3 * 4 * size)
    assert sent["dense"] == pytest.approx(sent["none"], rel=0.01)  # small sums are gathered
    matrices = [(256, 64), (64, 64), *2 * [(192, 64), (64, 64), (256, 64), (64, 256)]]
    factors = sum(2 * (n + m) for n, m in matrices)
    others = size - sum(n * m for n, m in matrices)
    assert sent[POWERSGD] == pytest.approx(2 * 2 / 3 * 4 * (factors + others))
    # Vectors have fewer elements than ``dense_below``.
    assert 0.01 * sent["dense"] < sent["recommended:density=0.01"] - 2 * 2 / 3 * 4 * others < 0.02 * sent["dense"]


class KilledError(Exception):
    """The process was killed, as far as the training notices."""


@pytest.mark.parametrize("exchange", [RECOMMENDED, nightly("dense"), nightly(POWERSGD)])
def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, exchange):
    """One piece ends as its time is over, between two evaluations, the next one without a checkpoint."""
    trained(tmp_path / "whole", exchange)
    folder = tmp_path / "pieces"
    folder.mkdir()
    for stop, done in ((12, True), (17, False), (99, True)):
        training = Training(settings(exchange), TEXT, folder)
        calls = [training.saved.get("step", 0)] * 3

        def until(calls=calls, stop=stop, done=done):
            rank = int(module.threading.current_thread().name.removeprefix("rank "))
            calls[rank] += 1
            if calls[rank] == stop and not done:
                raise KilledError
            return calls[rank] == stop

        training.until = until
        if done:
            assert training.run() == min(stop, 20)
        else:
            with pytest.raises(KilledError):
                training.run()
            assert len(records(folder)) == 3
    found, expected = records(folder), records(tmp_path / "whole")
    # Ranks agree in a separate round after a start.
    sent, theirs = ([point.pop("bytes_sent") for point in points] for points in (found, expected))
    assert sent == pytest.approx(theirs, rel=0.01)
    assert found == expected
    ours, whole = (checkpoint(place) for place in (folder, tmp_path / "whole"))
    assert ours.pop("sent") == pytest.approx(whole.pop("sent"), rel=0.01)
    assert same(ours, whole)


def test_a_run_that_is_done_is_not_repeated(tmp_path):
    before = trained(tmp_path / "run", "dense", steps=3)
    written = (tmp_path / "run" / CHECKPOINT).stat().st_mtime_ns
    assert Training(settings("dense", steps=3), TEXT, tmp_path / "run").run() == 3
    assert (tmp_path / "run" / CHECKPOINT).stat().st_mtime_ns == written
    assert same(before, list(checkpoint(tmp_path / "run")["model"].values()))


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    trained(tmp_path / "run", "dense", steps=2)
    with pytest.raises(ValueError, match="belongs to"):
        Training(settings("dense", steps=3), TEXT, tmp_path / "run")
    with pytest.raises(ValueError, match="belongs to"):
        Training(settings("dense", steps=2), Text(TEXT.held_out, TEXT.train, BYTES, 0.1), tmp_path / "run")


def test_ranks_that_diverge_are_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "exchange_for", lambda *_: type("Nothing", (), {"bytes_sent": 0.0}))
    with pytest.raises(RuntimeError, match="different parameters after step 5"):
        trained(tmp_path / "run", "dense")


def test_every_window_belongs_to_one_rank_and_step_of_an_epoch():
    text = Text(torch.arange(64 * 20 + 1), TEXT.held_out, BYTES, 0.1)
    data = Data(text, settings("dense"))  # three ranks of two windows: three steps of twenty windows
    epochs = [
        [data.batch(step, rank)[0][:, 0].tolist() for step in range(3 * epoch, 3 * epoch + 3) for rank in range(3)]
        for epoch in range(2)
    ]
    starts = [sorted(start for batch in epoch for start in batch) for epoch in epochs]
    assert all(len(set(one)) == 18 and {start % 64 for start in one} == {0} for one in starts)
    assert epochs[0] != epochs[1]
    tokens, targets = data.batch(4, 2)
    assert torch.equal(tokens + 1, targets)
    assert torch.equal(tokens, Data(text, settings("dense")).batch(4, 2)[0])  # whatever came before
    assert not torch.equal(tokens, Data(text, settings("dense", seed=1)).batch(4, 2)[0])


def test_the_command_trains_in_pieces_and_reports(tmp_path, capsys):
    source, output = tmp_path / "source", tmp_path / "runs"
    source.mkdir()
    for number in range(200):
        (source / f"{number}.md").write_text(bytes(words(60, number).tolist()).decode())
    shape = ["--model", "tiny", "--device", "cpu", "--ranks", "2", "--tokens-per-rank", "128", "--steps", "4"]
    for exchange in ("dense", "recommended:density=0.02"):
        command = [*shape, "--exchange", exchange, "--text", str(source), "--output", str(output)]
        assert main([*command, "--minutes", "0"]) == 0
        assert "1 of 4 steps are done: repeat the command" in capsys.readouterr().out
        assert main(command) == 0
        assert "4 of 4 steps are done\n" in capsys.readouterr().out
    assert main(["--report", str(output)]) == 0
    *table, found = capsys.readouterr().out.splitlines()
    assert table[0].startswith("tiny: 0.1M parameters, 2 ranks of 2 sequences")
    assert [line.split(" | ")[0] for line in table[-2:]] == ["| dense", "| recommended:density=0.02"]
    (one,) = json.loads(found)["tables"]
    dense, sparse = one["runs"]
    assert (dense["to_dense"], dense["tokens"], sparse["tokens"]) == (0, 4 * 2 * 128, 4 * 2 * 128)
    assert sparse["to_dense"] == sparse["held_out_loss"] - dense["held_out_loss"] != 0
    assert dense["of_dense"] == pytest.approx(1, rel=0.01)
    assert one["tokenizer"] == "bytes"
    assert one["torch"] == torch.__version__
    assert main(["--report", str(tmp_path / "nothing")]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens-per-rank", "100"], "multiple of 64, not 100"),
        (["--exchange", "recommended:density=2"], "density"),
        (["--exchange", "powersgd:rank=0"], "powersgd"),
        (["--exchange", "fp16"], "Horovod"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message, capsys, tmp_path):
    try:
        status = main(["--model", "tiny", "--output", str(tmp_path), *arguments])
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err
