#!/usr/bin/env python3
"""Runner of pytest under mpirun or torchrun, for each of several world sizes, with a hard time limit.

Rank 0 writes to the terminal, the other ranks to files. A failing rank ends the run; then the last lines of these
files are shown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_STARTUP = Path(__file__).resolve().parents[1] / "tests" / "startup"

# Variables in which launchers pass the rank to a process, available before MPI is initialized.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")

# `-m mpi4py` calls MPI_Abort if pytest fails: otherwise the other ranks would wait for this one forever. torchrun ends
# them by itself. The thread method of the time limit also works inside MPI calls.
_OVER_MPI = ("-m", "mpi4py")
_PYTEST = (
    *("-m", "pytest", "--with-mpi", "--exitfirst", "-p", "no:cacheprovider"),
    *("--timeout=60", "--timeout-method=thread", "--durations=20", "--durations-min=3"),
)

# Commands that are followed by the number of ranks and the program.
MPIRUN = ("mpirun", "-n")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run pytest at each world size, up to the first failure, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", required=True, help="world sizes, with one run for each")
    parser.add_argument("--torchrun", action="store_true", help="start the ranks with torchrun instead of mpirun")
    parser.add_argument("--limit", type=float, default=1200, help="seconds after which a run is ended")
    parser.add_argument("pytest", nargs="*", help="pytest's arguments, after --")
    options = parser.parse_args(arguments)
    if not options.torchrun and shutil.which("mpirun") is None:
        print("mpirun is not on PATH: run `make venv`, or load the module of your MPI", file=sys.stderr)
        return 1
    launcher = TORCHRUN if options.torchrun else MPIRUN
    return 0 if all(passes(ranks, options.pytest, options.limit, launcher) for ranks in options.ranks) else 1


def passes(ranks: int, arguments: Sequence[str], limit: float, launcher: Sequence[str] = MPIRUN) -> bool:
    """Run pytest on `ranks` ranks; return whether all of them passed within `limit` seconds."""
    title = f"{ranks} rank{'s' if ranks > 1 else ''}{' of torchrun' if launcher == TORCHRUN else ''}"
    print(f"\n== {title}: pytest {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mpitest-") as folder:
        # mpirun gives rank 0 a pseudo-terminal, so pytest would use colours even if the output is not a terminal.
        color = f"--color={'yes' if sys.stdout.isatty() else 'no'}"
        error = launch([*launcher, str(ranks), sys.executable, __file__, "--as-rank", folder, color, *arguments], limit)
        if error:
            show_ends(Path(folder))
    print(f"== {title}: {error or 'passed'} after {time.monotonic() - start:.0f} s", flush=True)
    return not error


def launch(command: Sequence[str], limit: float) -> str:
    """Run a command for at most `limit` seconds; return an error message, or an empty string on success."""
    # By default, Horovod's thread polls for work once per millisecond, which takes half of the cores that ranks share.
    # Set here, not in mpi_environment(): benchmarks time Horovod with its default.
    patient = {"HOROVOD_CYCLE_TIME": "10", **mpi_environment()}
    with subprocess.Popen(command, env=quick_start(patient)) as process:
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            return f"ended at the limit of {limit:.0f} s"
    return f"FAILED with status {status}" if status else ""


def mpi_environment() -> dict[str, str]:
    """Return variables for more ranks than cores (waiting must yield the core), and for root in a container."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    env["OMPI_MCA_hwloc_base_binding_policy"] = "none"
    # Under torchrun, torch asks for the name of every address it connects to; a lost answer costs 5 seconds.
    env["RES_OPTIONS"] = "timeout:1"
    if os.geteuid() == 0:
        env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return env


def quick_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which programs that use torch start in half the time (see tests/startup)."""
    folders = [str(_STARTUP), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(folders)}


def show_ends(folder: Path) -> None:
    """Print the last 60 lines of the ranks' files."""
    for path in sorted(folder.glob("rank *.txt")):
        text = path.read_text(errors="replace").splitlines()
        print(f"\n-- the last lines of {path.stem}\n" + "\n".join(text[-60:]), flush=True)


def as_rank(folder: str, arguments: Sequence[str]) -> None:
    """Replace this process by pytest on this rank; all ranks but 0 write into `folder`."""
    rank = next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)
    if rank > 0:
        output = os.open(Path(folder, f"rank {rank}.txt"), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
    # Each rank has private temporary files: pytest cleans up old ones, and ranks that do so at once would conflict.
    runner = [sys.executable, *(() if "TORCHELASTIC_RUN_ID" in os.environ else _OVER_MPI), *_PYTEST]
    os.execv(sys.executable, [*runner, f"--basetemp={folder}/files of rank {rank}", *arguments])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(sys.argv[2], sys.argv[3:])
    sys.exit(main())
