"""Lightning, Accelerate and the Trainer with both front ends; at density 1 as with a dense exchange."""

import ast
import functools
import json
from pathlib import Path

import launch
import pytest
from forkserver import TRAINING_MODULES, ForkServer

FOLDER = Path(__file__).parents[1] / "programs"
SETTINGS = {"plain": (), "accumulate": ("--accumulate", "2"), "clip": ("--clip", "0.1")}

MODULES = (*TRAINING_MODULES, "accelerate", "lightning.pytorch", "transformers.trainer")

FULL, NIGHTLY = pytest.mark.full, pytest.mark.nightly
pytestmark = pytest.mark.timeout(500)

# Programs and the setting that CI tests at density 1; before a release, all programs are run with all settings.
CI = {
    "lightning_horovod": "accumulate",
    "lightning_ddp by torchrun": "clip",
    "trainer_ddp by torchrun": "accumulate",
}
ALL = [*CI, "accelerate_ddp by torchrun", "trainer_horovod", "lightning_ddp", "accelerate_ddp"]
WITH_ADAPTERS = [program for program in ALL if "ddp by" in program]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains with a program of a framework; returns the reports of the two ranks."""
    with ForkServer(tmp_path_factory.mktemp("server"), MODULES, launch.ENVIRONMENT) as server:

        @functools.cache
        def run(program, *arguments):
            program, _, launcher = program.partition(" by ")
            done = start(server, program, launcher, *arguments)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
            reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
            assert sorted(report["rank"] for report in reports) == [0, 1]
            return reports

        yield run


def start(server, program, launcher, *arguments, ranks=2):
    """Run a program on two or more ranks and wait for it to end."""
    settings = {"ranks": ranks, "torchrun": () if launcher else None, "limit": 200, "server": server}
    return launch.python(str(FOLDER / f"{program}.py"), *arguments, **settings)


@pytest.fixture
def failed():
    """Run a program under torchrun, which fails; return its messages."""

    def run(program, *arguments, ranks=2):
        done = start(None, program, "torchrun", *arguments, ranks=ranks)
        assert done.returncode != 0
        return done.stderr

    return run


@pytest.fixture
def dense(trained):
    """Trains with Horovod's own exchange; returns the reports of the two ranks."""
    return functools.partial(trained, "lightning_horovod")


@pytest.mark.nightly
@pytest.mark.parametrize("program", ALL)
def test_the_dense_exchange_is_the_same_training_in_every_framework(trained, dense, program):
    for report in trained(program):
        assert report["steps"] == dense()[0]["steps"]
        assert report["loss"] == pytest.approx(dense()[0]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("program", "setting"),
    [
        pytest.param(program, setting, marks=FULL if CI.get(program) == setting else NIGHTLY)
        for program in ALL
        for setting in SETTINGS
    ],
)
def test_density_1_is_the_dense_training(trained, dense, program, setting):
    arguments = SETTINGS[setting]
    first, second = trained(program, *arguments, "--compression", "oktopk:density=1,dense_below=0")
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"] == dense(*arguments)[0]["steps"]
    assert first["loss"] == pytest.approx(dense(*arguments)[0]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "program",  # the Trainer learns in the test of adapters, too
    [pytest.param(one, marks=FULL if one in CI and "trainer" not in one else NIGHTLY) for one in ALL],
)
def test_a_sparse_training_learns_and_has_the_same_bits_on_every_rank(trained, dense, program):
    first, second = trained(program, "--compression", "oktopk:density=0.05,dense_below=0")
    assert first["digest"] == second["digest"] != dense()[0]["digest"]
    assert first["loss"] < UNTRAINED


@pytest.mark.parametrize(
    "program",
    [pytest.param(one, marks=FULL if one.startswith("trainer") else NIGHTLY) for one in WITH_ADAPTERS],
)
def test_adapters_are_trained_sparse_beside_frozen_parameters(trained, program):
    first, second = trained(program, "--lora", "--compression", "topka:density=0.1,dense_below=0")
    dense, _ = trained("accelerate_ddp by torchrun", "--lora")
    assert first["digest"] == second["digest"] != dense["digest"]
    assert first["frozen"] == dense["frozen"] != 0
    assert first["loss"] < UNTRAINED


@pytest.mark.full
def test_the_trainers_residuals_resume_with_equal_bits_on_the_same_number_of_ranks(trained, failed, tmp_path):
    program = "trainer_ddp by torchrun"
    sparse = ("--lora", "--compression", "topka:density=0.1,dense_below=0")
    uninterrupted = trained(program, *sparse)
    trained(program, *sparse, "--epochs", "1", "--folder", str(tmp_path))
    errors = failed("trainer_ddp", *sparse, "--folder", str(tmp_path), "--resume", ranks=3)
    assert all(f"rank {rank}: {tmp_path}" in errors for rank in range(3))
    assert "hvs.checkpoint merges" in errors
    resumed = trained(program, *sparse, "--folder", str(tmp_path), "--resume")
    assert {report["digest"] for report in resumed} == {report["digest"] for report in uninterrupted}
    assert resumed[0]["steps"] == uninterrupted[0]["steps"]


@pytest.mark.nightly
def test_an_evaluation_before_training_is_noticed_and_has_a_remedy(trained, failed):
    sparse = ("--compression", "topka:density=0.1")
    errors = failed("trainer_ddp", *sparse, "--evaluate-first")
    assert "the Trainer left the model without DDP" in errors
    assert "use_cpu=True" in errors
    assert "eval_on_start=True" in errors
    first, second = trained("trainer_ddp by torchrun", *sparse, "--eval-on-start")
    assert first["digest"] == second["digest"]


def test_the_page_shows_the_callback_of_these_tests():
    source = (FOLDER / "trainer_ddp.py").read_text()
    [callback] = [node for node in ast.parse(source).body if getattr(node, "name", "") == "Sparse"]
    assert ast.get_source_segment(source, callback) in (FOLDER.parents[1] / "docs/frameworks.md").read_text()


UNTRAINED = 0.7  # the network's loss before its first step is 0.75
