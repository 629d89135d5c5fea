"""Checks of the files of slurm/ that need no SLURM."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from stubs import put_program

REPOSITORY = Path(__file__).resolve().parents[2]
SLURM = REPOSITORY / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
TRAINING = [path for path in SCRIPTS if "train" in re.findall(r"\w+", path.read_text().split("set -euo", 1)[1])]


def section(name: str) -> str:
    """One section of apptainer.def."""
    sections = re.split(r"^%(\w+).*$", (SLURM / "apptainer.def").read_text(), flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True))[name]


def bash(*arguments: str, text: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run bash in the repository with these variables and none of the caller's."""
    environment = {"PATH": os.defpath, "VENV": "none", **variables}
    command, streams = ["bash", *arguments], {"input": text, "capture_output": True, "text": True}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=10, check=False, **streams)


SOURCES = {path.name: path.read_text() for path in sorted(SLURM.glob("*.s*"))}


@pytest.mark.parametrize("source", [*SOURCES.values(), section("post")], ids=[*SOURCES, "container"])
def test_bash_can_read_every_script(source: str) -> None:
    done = bash("-n", text=source)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_script_has_a_line_in_the_readme() -> None:
    text = (SLURM / "README.md").read_text()
    assert not [path.name for path in SLURM.iterdir() if path.name != "README.md" and f"`{path.name}`" not in text]


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_every_training_can_be_preempted(path: Path) -> None:
    text = path.read_text()
    assert "#SBATCH --requeue\n" in text
    assert "#SBATCH --open-mode=append\n" in text, "the log of the first part would be lost"
    assert re.search(r"^#SBATCH --signal=B:USR1@\d+$", text, re.MULTILINE)


def test_the_container_copies_files_that_exist() -> None:
    sources = [line.split()[0] for line in section("files").splitlines() if line.strip()]
    assert sources
    assert not [source for source in sources if not (REPOSITORY / source).exists()]


def test_the_documented_build_arguments_of_the_container_exist() -> None:
    known = re.findall(r"^ +(\w+)=", section("arguments"), re.MULTILINE)
    named = set(re.findall(r"--build-arg (\w+)=", (REPOSITORY / "docs/cluster.md").read_text()))
    assert named == set(known)
    assert not [name for name in known if f"{{{{ {name} }}}}" not in (SLURM / "apptainer.def").read_text()]


def settings(**variables: str) -> subprocess.CompletedProcess[str]:
    """Return the environment that env.sh leaves."""
    return bash("-c", "source slurm/env.sh && env", **variables)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("infiniband", "OMPI_MCA_pml=ucx"),
        ("slingshot", "FI_PROVIDER=cxi"),
        ("ethernet", "OMPI_MCA_btl_tcp_if_include=eth0"),
    ],
)
def test_a_network_has_its_settings(network: str, expected: str) -> None:
    assert expected in settings(NETWORK=network, TCP_INTERFACES="eth0").stdout.splitlines()
    assert expected not in settings(TCP_INTERFACES="eth0").stdout.splitlines()


def test_an_unknown_network_is_refused() -> None:
    done = settings(NETWORK="infinyband")
    assert done.returncode == 2
    assert "NETWORK=infinyband is unknown; known are: auto, infiniband" in done.stderr


def test_ranks_get_the_requested_cores() -> None:
    assert {"OMP_NUM_THREADS=5", "SRUN_CPUS_PER_TASK=6"} <= set(settings(SLURM_CPUS_PER_TASK="6").stdout.splitlines())
    assert "OMP_NUM_THREADS=1" in settings().stdout.splitlines()


def test_horovodrun_gets_every_node_with_its_slots(tmp_path: Path) -> None:
    put_program(tmp_path / "scontrol", '[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS_PER_NODE": "4",
    }
    done = bash("-c", "set -eu; source slurm/job.sh; hosts", PATH=f"{tmp_path}:{os.defpath}", **job)
    assert done.stdout == "n1:4,n2:4\n", done.stderr


@pytest.mark.parametrize("front_end", ["horovod", "ddp"])
def test_the_published_setup_trains_with_either_front_end(front_end: str, tmp_path: Path) -> None:
    put_program(tmp_path / "srun", 'echo "$@"')
    put_program(tmp_path / "sleep", "exec /bin/sleep 0.1")  # the real one would keep the output open
    put_program(tmp_path / "horovod-sparse", 'echo "$@"')
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "yoon", "SLURM_SUBMIT_DIR": ".", "LINKS": "pcie"}
    choice = {} if front_end == "horovod" else {"FRONTEND": front_end}
    done = bash("slurm/yoon2022.sbatch", PATH=f"{tmp_path}:{os.defpath}", OUTPUT=str(tmp_path), **job, **choice)
    *trainings, report = done.stdout.splitlines()
    assert len(trainings) == 4, done.stderr
    assert all(f" --frontend {front_end} --rules sorted_topk --no-overlap" in line for line in trainings)
    assert report.startswith("report ")
