"""A process that has loaded what programs import, and forks them: a rank starts in a fraction of a second.

    with ForkServer(folder, ["torch"]) as server:
        subprocess.run(["mpirun", "-n", "3", *server.stub, "program.py", "--option"])

mpirun starts stubs (`programs/stub.py`), which have the server fork a process for each of them; in it, environment,
folder and standard streams are those of the stub, and the program is run as if Python had been started with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

STUB = Path(__file__).parent / "programs" / "stub.py"
# Imported by examples/train.py, at its start or later.
TRAINING_MODULES = (
    *("torch", "torch.distributed", "horovod.torch", "mpi4py.MPI", "tqdm", "sklearn.datasets", "sklearn.metrics"),
    *(
        "horovod_sparse.frontends.horovod.optimizer",
        "horovod_sparse.frontends.ddp.state",
        "horovod_sparse.checkpoint.checkpoints",
    ),
)


class ForkServer:
    """The server, as a child of this process; it ends, with all that it has forked, when the block is left.

    Args:
        folder: For its socket, and for a file for each rank, with the number of its process.
        modules: Loaded before anything is forked.
        environment: Of the server.
    """

    def __init__(self, folder: Path, modules: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._program = [sys.executable, __file__, str(folder), *modules]
        self._environment = environment
        self.stub = [sys.executable, "-S", "-E", str(STUB), str(folder / "socket")]

    def __enter__(self) -> ForkServer:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._program, env=self._environment, **pipes)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the fork server has ended with status {self._process.wait()}")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # which ends it
        self._process.wait(60)
        self._process.stdout.close()

    def forget(self, limit: float = 60) -> list[int]:
        """Waits until the ranks of a job that has ended are gone, and forgets them; gives those that are left."""
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
        """The processes of the job's ranks, as far as they were forked."""
        paths = sorted(self._folder.glob("rank-*"))
        return {int(path.name.removeprefix("rank-")): int(path.read_text()) for path in paths}


class _Server:
    """Forks on demand, in one thread, as threads do not survive a fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._stubs: dict[int, tuple[socket.socket, int]] = {}  # connection and file descriptor of each process

    def serve(self) -> dict[str, Any]:
        """Returns a request, in the process that was forked for it; the server itself ends with its standard input."""
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self._folder / "socket"))
            door.listen(64)
            self._selector.register(door, selectors.EVENT_READ)
            self._selector.register(sys.stdin, selectors.EVENT_READ)
            print("ready", flush=True)
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is sys.stdin:
                        for process in self._stubs:
                            os.kill(process, signal.SIGKILL)
                        os._exit(0)  # to take apart what was loaded takes seconds
                    if key.fileobj is not door:
                        self._attend(key.data)
                    elif (request := self._begin(door.accept()[0])) is not None:
                        return request

    def _begin(self, stub: socket.socket) -> dict[str, Any] | None:
        """Forks; gives the request in the new process, and None in this one."""
        head, streams, _, _ = socket.recv_fds(stub, 8, 3)
        with stub.makefile("rb") as content:
            request: dict[str, Any] = json.loads(content.read(int.from_bytes(head, "big")))
        process = os.fork()
        if process == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            stub.close()
            for other, descriptor in self._stubs.values():
                other.close()
                os.close(descriptor)
            self._selector.close()
            return request
        for stream in streams:
            os.close(stream)
        rank = self._folder / f"rank-{request['environment'].get('OMPI_COMM_WORLD_RANK', 0)}"
        partial = self._folder / "new"
        partial.write_text(str(process))
        partial.rename(rank)
        stub.sendall(f"{process}\n".encode())
        descriptor = os.pidfd_open(process)
        self._stubs[process] = stub, descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, process)
        self._selector.register(stub, selectors.EVENT_READ, process)
        return None

    def _attend(self, process: int) -> None:
        """A process has ended, or its stub has."""
        if process not in self._stubs:
            return
        stub, descriptor = self._stubs.pop(process)
        self._selector.unregister(stub)
        self._selector.unregister(descriptor)
        if not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with contextlib.suppress(OSError):
            stub.sendall(f"{status}\n".encode())
        stub.close()
        os.close(descriptor)


def become(request: dict[str, Any]) -> None:
    """Runs the program that was asked for."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Init_thread()
    program, *_ = sys.argv = request["arguments"]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    """Loads modules and serves."""
    import mpi4py

    mpi4py.rc.initialize = False  # MPI does not survive a fork
    mpi4py.rc.finalize = True
    folder, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError(f"one of {', '.join(modules)} has started a thread, which would be missing after a fork")
    become(_Server(Path(folder)).serve())


if __name__ == "__main__":
    main()
