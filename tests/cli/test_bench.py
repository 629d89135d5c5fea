"""`horovod-sparse bench collectives` under mpirun: table, files, status, and refusals that leave no rank waiting."""

from __future__ import annotations

import json

import launch
import pytest

from horovod_sparse.cli import main
from horovod_sparse.cli.bench import PRESETS, where

RUN = """
import sys
from horovod_sparse.cli import main
status = main(sys.argv[1:])
sys.exit(3 if {"torch", "horovod"} & set(sys.modules) else status)
"""
REFUSED = """
import sys
from horovod_sparse.cli import main
SMALL = ["-b", "252", "-e", "252"]
for wrong in (["--algorithms", "topka,ringtopk"], ["--json", "/nowhere/rows.json"], [*SMALL, "--algorithms", "stable"]):
    try:
        status = main(["bench", "collectives", *wrong])
    except SystemExit as left:
        status = left.code
    assert status == 2
"""
ON_LAST_RANK = """
import sys
from mpi4py import MPI
from horovod_sparse.cli import main
from horovod_sparse.collectives import TopkA

allreduce = TopkA.allreduce

def broken(self, vector, k):
    exchange = allreduce(self, vector, k)
    if MPI.COMM_WORLD.Get_rank() == MPI.COMM_WORLD.Get_size() - 1:
        {}
    return exchange

TopkA.allreduce = broken
sys.exit(main(sys.argv[1:]))
"""
SMALL = ("bench", "collectives", "-b", "4K", "-e", "8K", "-f", "2", "-n", "3", "-w", "1")


def table(output):
    """The rows of the table by algorithm, size and density; the columns by their heads."""
    lines = output.splitlines()
    heads = (
        next(line for line in lines if line.startswith("#") and "algbw" in line and "size" in line).lstrip("#").split()
    )
    rows = [dict(zip(heads, line.split(), strict=True)) for line in lines if line and not line.startswith("#")]
    return {(row["algorithm"], row["elements"], row["density"]): row for row in rows}


@pytest.mark.full
def test_table_and_files_hold_every_size_density_and_preset_without_torch_or_horovod(tmp_path):
    files = ("--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png"))
    done = launch.python("-c", RUN, *SMALL, "--density", "0.01,0.1", *files, ranks=2)
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    sparse = set(PRESETS) - {"dense"}
    configurations = {("dense", "1"), *((name, density) for name in sparse for density in ("0.01", "0.1"))}
    assert rows.keys() == {(name, size, density) for name, density in configurations for size in ("1,024", "2,048")}
    assert all(row["#wrong"] == "0" for row in rows.values())
    assert all(float(row[stage]) > 0 for row in rows.values() for stage in ("min", "exchange", "apply"))
    content = json.loads((tmp_path / "rows.json").read_text())
    assert (content["environment"]["ranks"], content["environment"]["hosts"]) == (2, 1)
    assert "collectives" in content["environment"]["command"]
    assert [f"{row['max_ms']:.3f}" for row in content["rows"]] == [row["max"] for row in rows.values()]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_a_wrong_result_is_counted_and_ends_with_status_1():
    lose = "exchange.total.values[0] += 1"
    done = launch.python("-c", ON_LAST_RANK.format(lose), *SMALL, "--algorithms", "topka,dense", ranks=2)
    assert done.returncode == 1
    wrong = {name: row["#wrong"] for (name, _, _), row in table(done.stdout).items()}
    assert wrong == {"topka": "2", "dense": "0"}  # an element, and a rank with other bits


def test_a_rank_that_fails_ends_the_others():
    done = launch.python("-c", ON_LAST_RANK.format("raise KeyError('gone')"), *SMALL, ranks=3, limit=60)
    assert done.returncode != 0
    assert "KeyError: 'gone'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-b", "-5"), "-b"),
        (("-b", "8M", "-e", "4M"), "begin <= end"),
        (("-b", "2", "-e", "3"), "4 <= begin"),
        (("-f", "1"), "at least 2"),
        (("-n", "0"), "at least 1"),
        (("--density", "0"), "0.01"),
        (("--density", "0.1,2"), "(0, 1]"),
    ],
)
def test_bad_input_is_refused_before_mpi_starts(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "collectives", *arguments])
    assert message in capsys.readouterr().err


def test_ranks_not_started_by_mpi_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "collectives"])
    assert "SLURM_STEP_NUM_TASKS=2 says" in capsys.readouterr().err


def test_all_ranks_exit_and_one_prints_the_reason():
    done = launch.python("-c", REFUSED, ranks=3, limit=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("unknown algorithm 'ringtopk'; known are: recommended, topka") == 1
    assert done.stderr.count("the folder /nowhere does not exist") == 1
    assert done.stderr.count("stable selects blocks of 64 elements, but -b gives vectors of 63") == 1


@pytest.mark.parametrize(("ranks", "hosts", "text"), [(1, 1, "1 rank on 1 host"), (4, 2, "4 ranks on 2 hosts")])
def test_numbers_of_ranks_and_hosts_are_in_plain_words(ranks, hosts, text):
    assert where({"ranks": ranks, "hosts": hosts}) == text
