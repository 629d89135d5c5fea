"""Linux namespaces of an emulated cluster; root is not needed.

    python -I benchmarks/cluster/namespaces.py NODE COMMAND ...

runs a command on a node from inside the namespaces; Open MPI uses it as its rsh agent. Without arguments, this file is
the process that holds the namespaces. It imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

CORES = "CLUSTER_CORES"  # environment variable: the cores of node 0, of node 1, ..., as for taskset, between spaces
_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child")
_USER = ("--user", "--map-root-user")  # root inside these namespaces, this user outside
# Runs a command in a folder, passed as $0. The shell does not expand the command's arguments.
_IN_FOLDER = ("sh", "-c", 'cd "$0" && exec "$@"')


class Namespaces:
    """Private network, mount and PID namespaces, in which this process has root privileges.

    A holder process keeps them until this process closes its end of a pipe, by ``close`` or by ending for any reason.
    All processes inside end with the holder. No files remain, because ``/run`` is a private file system.

    Args:
        environment: Environment of the processes inside.

    Raises:
        RuntimeError: This process may not create namespaces.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        reasons = []
        # Root of a container may also need a user namespace.
        for user in ((), _USER) if os.geteuid() == 0 else (_USER,):
            self._user = ("--user", "--preserve-credentials") if user else ()
            self._holder = subprocess.Popen(
                [*_UNSHARE, *user, sys.executable, "-I", __file__],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C must not end the holder
            )
            if self._holder.stdout and (pid := self._holder.stdout.readline().strip()):
                self._pid = pid
                return
            reasons.append(self._holder.communicate()[1].strip())
        raise RuntimeError(
            f"no namespaces for user {os.geteuid()} ({'; '.join(reasons)}): run as root, or have root allow "
            "user namespaces (sysctl user.max_user_namespaces, Ubuntu: kernel.apparmor_restrict_unprivileged_userns=0)"
        )

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command inside, in the current folder."""
        inside = ("nsenter", "--target", self._pid, *self._user, "--mount", "--net", "--pid")
        return [*inside, *_IN_FOLDER, str(Path.cwd()), *command]

    def run(self, command: Sequence[str], text: str | None = None) -> str:
        """Run a command inside and return its output.

        Args:
            command: Command and its arguments.
            text: Standard input; None: inherited.

        Raises:
            RuntimeError: The command failed; the message contains its output.
        """
        line = self.enter(command)
        done = subprocess.run(line, env=self._environment, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def run_all(self, commands: Iterable[Sequence[str]]) -> None:
        """Run commands inside, in order."""
        for command in commands:
            self.run(command)

    def end_processes(self) -> None:
        """Kill all processes inside except the holder."""
        with contextlib.suppress(RuntimeError):  # the shell may be killed, too
            self.run(["sh", "-c", "kill -9 -1"])

    def close(self) -> None:
        """End all processes inside and remove the namespaces."""
        self._holder.communicate()


def on(node: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command in a node's network, from inside the namespaces."""
    return ["nsenter", f"--net=/run/netns/{node}", *command]


def named(node: str, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command line of ``on``, extended by the node's name as the host name, and by its share of the cores.

    Open MPI assumes that processes with the same host name share memory. If ranks of more nodes than there are cores
    were free to wander, three of four would at times share one core, and steps take half as long again.
    """
    bound = ["taskset", "--cpu-list", environment[CORES].split()[int(node.removeprefix("node"))]]
    return on(node, [*bound, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node, *command])


def shares(nodes: int, cores: Sequence[int]) -> str:
    """Return the value of CLUSTER_CORES: cores dealt out to the nodes, or shared in turn where there are too few."""
    dealt = [cores[number::nodes] or [cores[number % len(cores)]] for number in range(nodes)]
    return " ".join(",".join(map(str, mine)) for mine in dealt)


def _hold() -> None:
    """Keep the namespaces until the other end of standard input is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps orphans, which PID 1, this process, inherits
    print(Path("/proc/self").readlink(), flush=True)  # the PID on the host, as /proc is the host's
    sys.stdin.read()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _hold()
    else:
        shell = ["sh", "-c", " ".join(sys.argv[2:])]  # as with rsh and ssh, a shell parses the command
        os.execvp("nsenter", named(sys.argv[1], shell))
