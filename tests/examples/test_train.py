"""train.py as a user starts it: as one process, under mpirun and torchrun, through both front ends."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch
import pytest
import saving
import torch
from asynchronous import AsynchronousDevice, Clock
from forkserver import ForkServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from train import main, train_step

from horovod_sparse.metrics.log import read

TRAIN = Path(__file__).resolve().parents[2] / "examples" / "train.py"
TEST_IMAGES = 360


SPARSE = (
    *("--compression", "topka:density=0.01,indices=plain", "--epochs", "1", "--warmup-epochs", "0"),
    *("--clip", "5", "--batch-size", "16", "--backward-passes-per-step", "2", "--trace"),
)
# train.py where some modules are not installed.
WITHOUT = (
    "import runpy, sys; sys.modules |= dict.fromkeys(sys.argv[1].split()); del sys.argv[1]; "
    f"sys.path[0] = {str(TRAIN.parent)!r}; runpy.run_path({str(TRAIN)!r}, run_name='__main__')"
)


FULL = partial(pytest.param, marks=pytest.mark.full)
NIGHTLY = partial(pytest.param, marks=pytest.mark.nightly)

Run = subprocess.CompletedProcess[str]
Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(training_server: ForkServer, tmp_path: Path) -> Train:
    """Runs train.py under mpirun, or torchrun with options; returns the results."""

    def run(*arguments: str, ranks: int = 2, torchrun: Sequence[str] | None = None) -> dict[str, Any]:
        command = (str(TRAIN), *arguments, "--output", str(tmp_path))
        return result(launch.python(*command, ranks=ranks, torchrun=torchrun, server=training_server), tmp_path)

    return run


def result(run: Run, output: Path) -> dict[str, Any]:
    """The run's results; fails with its messages where it did."""
    assert run.returncode == 0, run.stdout + run.stderr
    content: dict[str, Any] = json.loads((output / "result.json").read_text())
    return content


def check_sparse_on_two_ranks(content: dict[str, Any], output: Path, *waits: str) -> dict[str, Any]:
    """The only epoch, at density 0.01 with two passes of 16 images a step; every stage and ``waits`` took time."""
    (epoch,) = content["epochs"]
    assert content["ranks"] == 2
    assert content["steps_per_epoch"] == 719 // 32
    assert epoch["test_accuracy"] > 0.25
    assert sends_a_hundredth(epoch["bytes_per_step"], content)
    stages = epoch["ms_per_step"]
    assert all(stages[name] > 0 for name in ("forward", "backward", "select", "exchange", "apply", *waits))
    events = json.loads((output / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    return epoch


def sends_a_hundredth(sent: float, content: dict[str, Any]) -> bool:
    """Whether an exchange has sent a hundredth of the entries, and small parameters dense."""
    entries = 0.01 * content["parameter_count"]
    return 8 * entries * 0.9 < sent < 8 * entries + 4 * 3000


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values that TensorBoard shows, by name."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.full
def test_a_single_process_learns(tmp_path: Path) -> None:
    board = tmp_path / "board"
    schedule = ("--warmup-epochs", "0", "--schedule", "constant")
    run = launch.python(str(TRAIN), "--epochs", "1", *schedule, "--tensorboard", str(board), "--output", str(tmp_path))
    content = result(run, tmp_path)
    (epoch,) = content["epochs"]
    assert content["ranks"] == 1
    assert content["steps_per_epoch"] == 1437 // 32
    assert epoch["test_accuracy"] > 0.7
    assert epoch["bytes_sent"] == 0
    assert epoch["samples_per_second"] > 0
    assert epoch["lr"] == 0.05
    assert {"torch", "horovod", "horovod_sparse"} <= set(content["versions"])
    assert len(run.stderr.splitlines()) < 20, "the progress bar is noisy where there is no terminal"
    about, (record,) = read(tmp_path)
    assert (about["compression"], about["model"], record["step"]) == ("none", "cnn", content["steps_per_epoch"])
    assert (record["loss"], record["accuracy"]) == (epoch["train_loss"], epoch["test_accuracy"])
    assert scalars(board)["accuracy"] == [(record["step"], pytest.approx(record["accuracy"]))]


@pytest.mark.full
def test_two_ranks_train_sparse(train: Train, tmp_path: Path) -> None:
    content = train(*SPARSE, "--tensorboard", str(tmp_path / "board"))
    epoch = check_sparse_on_two_ranks(content, tmp_path, "synchronize")
    correct = epoch["test_accuracy"] * TEST_IMAGES
    assert correct == pytest.approx(round(correct), abs=1e-9), "every test image counts once"
    _, (record,) = read(tmp_path)
    assert record["total/steps"] == content["steps_per_epoch"]
    assert record["total/bytes_sent"] == pytest.approx(epoch["bytes_sent"])  # the same on both ranks
    assert record["total/seconds_select"] > 0
    assert 0 < record["seconds_forward"] < record["seconds_step"]
    assert scalars(tmp_path / "board")["total/density"] == [(record["step"], pytest.approx(record["total/density"]))]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.nightly
@pytest.mark.parametrize("front_end", ["horovod", "ddp"])
def test_two_ranks_train_with_mixed_precision(front_end: str, train: Train) -> None:
    settings = ("--frontend", front_end, "--amp", "--compression", "oktopk:density=0.05", "--clip", "5")
    (epoch,) = train(*settings, "--epochs", "1", "--warmup-epochs", "0")["epochs"]
    assert epoch["test_accuracy"] > 0.4


@pytest.mark.full
def test_two_ranks_take_local_steps(train: Train) -> None:
    """The last round of an epoch ends early: 6 rounds of 22 steps."""
    arguments = ["--compression", "topka:density=0.01,indices=plain", "--local-steps", "4", "--clip", "5"]
    content = train(*arguments, "--warmup-epochs", "0", "--epochs", "4")
    assert content["steps_per_epoch"] == 22
    assert all(sends_a_hundredth(epoch["bytes_per_step"] * 22 / 6, content) for epoch in content["epochs"])
    assert content["epochs"][-1]["test_accuracy"] > 0.25


@pytest.mark.full
def test_two_ranks_train_dense_and_charge_a_ring(train: Train, tmp_path: Path) -> None:
    content = train("--epochs", "1")
    (epoch,) = content["epochs"]
    assert epoch["bytes_per_step"] == 2 * 0.5 * 4 * content["parameter_count"]
    assert epoch["ms_per_step"]["select"] == 0
    _, (record,) = read(tmp_path)
    assert record["total/bytes_sent"] == epoch["bytes_sent"]
    assert "total/seconds_select" not in record


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compression", "topk"], "train.py: unknown compression 'topk'; known are: "),
        (["--rules", "nowhere"], "train.py: No module named 'nowhere'"),
        (["--data", "cifar10:nowhere"], "nowhere lacks data_batch_1.bin"),
        (["--device", "cuda"], "torch finds no GPU"),
        (["--frontend", "ddp", "--local-steps", "4"], "--local-steps needs --frontend horovod"),
        (["--epochs", "0"], "argument --epochs: must be an integer of at least 1, not '0'"),
        (["--momentum", "-1"], "argument --momentum: must be a finite number of at least 0, below 1, not '-1'"),
        (["--lr", "nan"], "argument --lr: must be a finite number of at least 0, not 'nan'"),
        (["--weight-decay", "inf"], "argument --weight-decay: must be a finite number"),
        (["--seed", "-1"], "argument --seed: must be an integer of at least 0"),
        (["--warmup-epochs", "-3"], "argument --warmup-epochs: must be"),
        (["--resume", "-3"], "argument --resume: must be"),
    ],
)
def test_bad_arguments_end_before_horovod_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert message in str(left.value) + capsys.readouterr().err


@pytest.mark.full
def test_a_folder_that_cannot_be_written_ends_the_run_before_it_begins() -> None:
    run = launch.python(str(TRAIN), "--output", "/proc/x", "--epochs", "1")
    assert run.returncode != 0
    assert "train.py: cannot write into --output /proc/x: " in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("front_end", [NIGHTLY("horovod"), FULL("ddp")])
def test_a_compression_that_differs_between_ranks_ends_all_of_them(front_end: str) -> None:
    program = (
        "import os, runpy, sys; first = os.environ['OMPI_COMM_WORLD_RANK'] == '0'; "
        f"sys.argv = ['train.py', '--frontend', '{front_end}', '--compression', 'topka' if first else 'none']; "
        f"sys.path[0] = {str(TRAIN.parent)!r}; runpy.run_path({str(TRAIN)!r}, run_name='__main__')"
    )
    run = launch.python("-c", program, ranks=2)
    assert run.returncode != 0
    assert "compression differs between ranks" in run.stderr


class NothingIsRead(TorchDispatchMode):
    """Lets no number out of a tensor, for which the host would wait for the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_step_does_not_wait_for_its_loss() -> None:
    """Otherwise the wait would lie between the spans, and the time of forward and backward with it."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    front_end = SimpleNamespace(accumulating=nullcontext, exchanged=nullcontext)
    args = Namespace(device="cpu", batch_size=4, backward_passes_per_step=2, amp=False, clip=0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    images, labels = torch.rand(8, 1, 4, 4), torch.arange(8) % 3
    expected = torch.nn.functional.cross_entropy(model(images), labels).item()
    with NothingIsRead():
        loss = train_step(args, front_end, model, optimizer, scaler, images, labels)
    assert float(loss) == pytest.approx(expected, rel=1e-6)


def test_the_time_of_an_epoch_includes_what_the_device_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    device = AsynchronousDevice(clock)
    monkeypatch.setattr(saving, "time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    args = Namespace(device="cuda", checkpoint=None, checkpoint_every=0, resume="none", digest=None)
    front_end = SimpleNamespace(rank=0, exchange=None)
    run = saving.Saving(args, front_end, lambda: False, SimpleNamespace())
    run.begin(saving.Position(seconds=2.0))
    device.launch(3_000_000_000)
    assert run.seconds == pytest.approx(5.0)


@pytest.mark.parametrize("compression", [NIGHTLY("none"), FULL("topka:density=0.01")])
@pytest.mark.parametrize("front_end", ["horovod", NIGHTLY("ddp")])
def test_without_overlap_the_times_add_up_and_the_result_stays(front_end: str, compression: str, train: Train) -> None:
    common = ["--frontend", front_end, "--compression", compression, "--epochs", "2", "--warmup-epochs", "0"]
    beside, after = train(*common), train(*common, "--no-overlap")
    assert after["parameters"] == beside["parameters"]
    stages = after["epochs"][-1]["ms_per_step"]
    exchange = sum(stages[stage] for stage in ("select", "agree", "exchange", "apply"))
    assert exchange <= stages["synchronize"]
    assert sum(stages[stage] for stage in ("forward", "backward", "synchronize", "update")) <= stages["step"]


@pytest.mark.parametrize(
    ("torchrun", "missing"),
    [NIGHTLY(None, "horovod", id="mpirun"), FULL((), "horovod mpi4py", id="torchrun")],
)
def test_ddp_trains_sparse_without_horovod(tmp_path: Path, torchrun: Sequence[str] | None, missing: str) -> None:
    """The first of the two backward passes of a step exchanges nothing."""
    arguments = ("--frontend", "ddp", *SPARSE, "--output", str(tmp_path))
    content = result(launch.python("-c", WITHOUT, missing, *arguments, ranks=2, torchrun=torchrun), tmp_path)
    check_sparse_on_two_ranks(content, tmp_path)
    assert "horovod" not in content["versions"]
    assert ("mpi" in content["versions"]) == (torchrun is None)


@pytest.mark.timeout(250)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings.split(), marks=mark, id=name)
        for name, mark, settings in (
            ("oktopk", pytest.mark.nightly, "bucket_bytes=100000,dense_below=0,indices=plain --batch-size 8 --clip 5"),
            ("dgc", pytest.mark.nightly, "momentum=0.9,indices=plain --momentum 0"),
            ("topka", pytest.mark.nightly, "schedule=warmup,wire=float16,indices=coded --optimizer adamw --lr 0.001"),
        )
    ],
)
def test_both_front_ends_and_transports_end_with_the_same_bits(name: str, settings: list[str], train: Train) -> None:
    options, *arguments = settings
    common = ["--epochs", "2", "--backward-passes-per-step", "2", "--warmup-epochs", "1", *arguments]
    common += ["--compression", f"{name}:density=0.05,{options}"]
    one, *others = (
        train(*common, "--frontend", front_end, ranks=3, torchrun=torchrun)
        for front_end, torchrun in (("horovod", None), ("ddp", None), ("ddp", ()))
    )
    losses = [epoch[name] for epoch in one["epochs"] for name in ("train_loss", "test_loss")]
    for other in others:
        assert one["parameters"] == other["parameters"]
        assert one["densities"] == other["densities"]
        for name in ("test_accuracy", "bytes_sent", "lr"):
            assert [epoch[name] for epoch in one["epochs"]] == [epoch[name] for epoch in other["epochs"]]
        # MPI and Gloo add the ranks' losses in different orders.
        of_other = [epoch[name] for epoch in other["epochs"] for name in ("train_loss", "test_loss")]
        assert of_other == pytest.approx(losses, rel=1e-12)


@pytest.mark.nightly
@pytest.mark.timeout(450)
def test_dense_and_at_density_1_both_front_ends_end_alike(train: Train) -> None:
    losses = {}
    for front_end, compression in (("horovod", "none"), ("ddp", "none"), ("ddp", "topka:density=1"), ("ddp", "fp16")):
        _, epoch = train("--frontend", front_end, "--compression", compression, "--epochs", "2")["epochs"]
        losses[front_end, compression] = epoch["train_loss"]
    expected = losses["horovod", "none"]
    assert losses["ddp", "none"] == pytest.approx(expected, rel=1e-3)
    assert losses["ddp", "topka:density=1"] == pytest.approx(expected, rel=1e-3)
    assert losses["ddp", "fp16"] == pytest.approx(expected, rel=0.05)


@pytest.mark.nightly
def test_ddp_on_one_process(tmp_path: Path) -> None:
    arguments = ("--frontend", "ddp", "--warmup-epochs", "0", "--compression", "topka:density=0.01", "--epochs", "1")
    (epoch,) = result(launch.python(str(TRAIN), *arguments, "--output", str(tmp_path)), tmp_path)["epochs"]
    assert epoch["test_accuracy"] > 0.7
    assert epoch["bytes_sent"] == 0
