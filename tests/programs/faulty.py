"""examples/train.py with something that goes wrong on one rank, where and when the first argument says.

    faulty.py WHAT@RANK@COUNT[,WHAT@RANK@COUNT...] [arguments of train.py]

WHAT happens when the rank comes there for the COUNT-th time, from 0:

    kill:STAGE   SIGKILL as a span of this name begins
    kill:fsync   SIGKILL when a part of a checkpoint has been written, but not to the disk
    kill:rename  SIGKILL before a checkpoint gets its name, or loses it
    term:fsync   SIGTERM then
    full         no file may grow beyond 64 KiB, until COUNT checkpoints have failed
    modes        on all ranks: root may not write where files and folders do not allow it either
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FAULTS = [fault.split("@") for fault in sys.argv[1].split(",")]

if FAULTS[0][0] == "modes" and os.geteuid() == 0:
    rights = "-dac_override,-dac_read_search"
    again = [sys.executable, __file__, "none@0@0", *sys.argv[2:]]
    os.execvp("setpriv", ["setpriv", "--bounding-set", rights, "--inh-caps", rights, *again])

import horovod.torch as hvd  # noqa: E402

import horovod_sparse as hvs  # noqa: E402
from horovod_sparse import metrics  # noqa: E402
from horovod_sparse.checkpoint import checkpoints  # noqa: E402


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Lets something be done before a function, each time that it is called."""
    original = getattr(owner, name)

    def function(*arguments: Any, **settings: Any) -> Any:
        act(*arguments)
        return original(*arguments, **settings)

    setattr(owner, name, function)


def send(number: int, count: int) -> Callable[[], None]:
    """Sends this process a signal in the count-th call, from 0."""
    calls = iter(range(count + 1))
    return lambda: os.kill(os.getpid(), number) if next(calls, None) == count else None


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fill_the_disk(count: int) -> None:
    init, failures = hvd.init, []

    def full_init() -> None:
        init()  # MPI makes large files
        limit_files(1 << 16)

    def counting_store(*arguments: Any, **settings: Any) -> str:
        try:
            return store(*arguments, **settings)
        except hvs.checkpoint.CheckpointError:
            failures.append(1)
            if len(failures) == count:
                limit_files(resource.RLIM_INFINITY)
            raise

    store = checkpoints.store
    hvd.init, checkpoints.store = full_init, counting_store


def arrange(what: str, count: int) -> None:
    """Prepares what is to go wrong on this rank."""
    if what == "full":
        fill_the_disk(count)
        return
    kind, _, stage = what.partition(":")
    act = send(signal.SIGKILL if kind == "kill" else signal.SIGTERM, count)
    if stage == "fsync":
        before(os, "fsync", lambda *_: act())
    elif stage == "rename":
        before(Path, "rename", lambda *_: act())
    else:
        before(metrics, "span", lambda name, *_: act() if name == stage else None)


def save_in_order() -> None:
    """Lets the program wait for each save, so that tests know which are whole; soak.py does without."""
    async_save = hvs.checkpoint.Checkpoints.async_save

    def save_and_wait(self: Any, *arguments: Any, **settings: Any) -> None:
        async_save(self, *arguments, **settings)
        self.wait()

    hvs.checkpoint.Checkpoints.async_save = save_and_wait


save_in_order()
for what, rank, count in FAULTS:
    if os.environ["OMPI_COMM_WORLD_RANK"] == rank and what != "none":
        arrange(what, int(count))
sys.argv = [str(EXAMPLES / "train.py"), *sys.argv[2:]]
sys.path.insert(0, str(EXAMPLES))
runpy.run_path(sys.argv[0], run_name="__main__")
