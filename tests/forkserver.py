"""Server process with preloaded modules that forks programs: a rank starts in a fraction of a second.

    with ForkServer(folder, ["torch"]) as server:
        subprocess.run(["mpirun", "-n", "3", *server.stub, "program.py", "--option"])

mpirun or torchrun starts stubs (`programs/stub.py`), and the server forks a process for each stub. The process has the
environment, working directory and standard streams of the stub, and runs the program as if Python had been started with
it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch_ranks

STUB = Path(__file__).parent / "programs" / "stub.py"
# Modules that examples/train.py imports, at startup or later.
TRAINING_MODULES = (
    *("torch", "torch.distributed", "horovod.torch", "mpi4py.MPI", "tqdm", "sklearn.datasets", "sklearn.metrics"),
    *(
        "horovod_sparse.frontends.horovod.optimizer",
        "horovod_sparse.frontends.ddp.state",
        "horovod_sparse.checkpoint.checkpoints",
    ),
)


class ForkServer:
    """Fork server as a child of this process. It ends at the end of the block, with all processes that it has forked.

    Args:
        folder: Folder of the socket, and of one file per rank with its process ID.
        modules: Modules that the server imports before the first fork.
        environment: Environment of the server; None for that of this process.
    """

    def __init__(self, folder: Path, modules: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._program = [sys.executable, __file__, str(folder), *modules]
        self._environment = environment
        self.stub = [sys.executable, "-S", "-E", str(STUB), str(folder / "socket")]

    def __enter__(self) -> ForkServer:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._program, env=self._environment, **pipes)
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the fork server ended with status {self._process.wait()}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            # Input ends the server even if a process that this one has forked since holds the pipe open, such as a
            # worker of a DataLoader.
            self._process.communicate(b"\n", timeout=60)

    def forget(self, limit: float = 60) -> list[int]:
        """Wait until the ranks of a finished job have ended, and forget them; return the process IDs that are left."""
        end = time.monotonic() + limit
        while (
            left := [pid for pid in self.ranks.values() if Path(f"/proc/{pid}").exists()]
        ) and time.monotonic() < end:
            time.sleep(0.01)
        for path in self._folder.glob("rank-*"):
            path.unlink()
        return left

    @property
    def ranks(self) -> dict[int, int]:
        """Process IDs of the job's ranks that have been forked so far, by rank."""
        paths = sorted(self._folder.glob("rank-*"))
        return {int(path.name.removeprefix("rank-")): int(path.read_text()) for path in paths}


def serve(folder: Path) -> dict[str, Any]:
    """Return a request, in the process forked for it. The server itself ends when its standard input has data or ends.

    It has one thread, because threads do not survive a fork.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the attendants
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            stub, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _attend(stub, folder)
            stub.close()
    os._exit(0)  # skips the teardown of the modules, which takes seconds


def _attend(stub: socket.socket, folder: Path) -> dict[str, Any]:
    """Fork; return the request in the new process. This one ends when that process, the stub or the server ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(stub, 8, 3)
    with stub.makefile("rb") as content:
        request: dict[str, Any] = json.loads(content.read(int.from_bytes(head, "big")))
    process = os.fork()
    if process == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        stub.close()
        return request
    for stream in streams:
        os.close(stream)
    environment = request["environment"]
    rank = environment.get("OMPI_COMM_WORLD_RANK") or environment.get("RANK", 0)
    partial = folder / f"new-{rank}"
    partial.write_text(str(process))
    partial.rename(folder / f"rank-{rank}")
    stub.sendall(f"{process}\n".encode())
    ended = os.pidfd_open(process)
    if ended not in select.select([ended, stub, sys.stdin], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):
        stub.sendall(f"{status}\n".encode())
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Run the requested program in this process."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "mpi4py.MPI" in sys.modules and not torch_ranks.launched():
        sys.modules["mpi4py.MPI"].Init_thread()
    program, *_ = sys.argv = request["arguments"]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    """Import the modules and serve requests."""
    import mpi4py

    mpi4py.rc.initialize = False  # MPI does not survive a fork
    mpi4py.rc.finalize = True
    folder, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError(f"one of {', '.join(modules)} has started a thread, which would not survive a fork")
    become(serve(Path(folder)))


if __name__ == "__main__":
    main()
