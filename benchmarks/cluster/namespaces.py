"""Network namespaces of one machine: how they are made, entered and removed.

    python -I benchmarks/cluster/namespaces.py NODE COMMAND ...

runs a command on a node: the rsh agent that Open MPI starts others with. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_ETC = Path("/etc/netns")  # `ip netns exec` shows the files of a namespace's folder here as its own in /etc


def enter(node: str, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` in a node's network namespace, under the node's own host name.

    Open MPI takes processes with the same host name for neighbours that share memory.
    """
    named = 'hostname "$0" && exec "$@"'
    return ["ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", named, node, *command]


def take_down(name: str = "hvs") -> None:
    """Ends what runs on the nodes of a cluster and removes all of it; nothing happens where nothing is left."""
    require_root()
    namespaces = existing(name)
    end_processes(namespaces)
    for namespace in namespaces:
        with contextlib.suppress(RuntimeError):  # another process takes it down, too
            run(["ip", "netns", "delete", namespace])
        shutil.rmtree(_ETC / namespace, ignore_errors=True)
        for folder in Path(tempfile.gettempdir()).glob(f"ompi.{namespace}.*"):  # of processes that were killed
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # others may use it
        _ETC.rmdir()
    if left := existing(name):
        raise RuntimeError(f"{', '.join(left)} could not be removed: see `ip netns delete {left[0]}`")


def existing(name: str) -> list[str]:
    """The namespaces of a cluster, the switch included."""
    present = [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines()]
    return [one for one in present if re.fullmatch(rf"{re.escape(name)}(\d+|-switch)", one)]


def end_processes(namespaces: Iterable[str]) -> None:
    """Ends everything that runs in these namespaces."""
    for namespace in namespaces:
        with contextlib.suppress(RuntimeError):  # it is gone already
            for process in run(["ip", "netns", "pids", namespace]).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)


def keep_order(namespace: str, device: str) -> None:
    """Has each connection's packets handled on one processor (RPS).

    A virtual link handles them wherever the sender runs at the moment, and TCP takes the disorder for loss.
    """
    processors = f"{(1 << min(os.cpu_count() or 1, 32)) - 1:x}"
    run(["ip", "netns", "exec", namespace, "tee", f"/sys/class/net/{device}/queues/rx-0/rps_cpus"], processors)


def write_hosts(namespace: str, addresses: Mapping[str, str]) -> None:
    """Gives a namespace names for addresses, as /etc/hosts does."""
    lines = [f"{address} {name}" for name, address in addresses.items()]
    (_ETC / namespace).mkdir(parents=True, exist_ok=True)
    (_ETC / namespace / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def require_root() -> None:
    """Raises RuntimeError where this process may not make namespaces."""
    if os.geteuid() != 0:
        raise RuntimeError("network namespaces need root: run this with `sudo -E`, by the environment's own python")


def run_all(commands: Iterable[Sequence[str]]) -> None:
    """Runs commands one after the other."""
    for command in commands:
        run(command)


def run(command: Sequence[str], text: str | None = None) -> str:
    """Runs a command and returns its output; raises RuntimeError with its message where it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


if __name__ == "__main__":
    shell = ["sh", "-c", " ".join(sys.argv[2:])]  # the command is meant for a shell, as with rsh and ssh
    os.execvp("ip", enter(sys.argv[1], shell))
