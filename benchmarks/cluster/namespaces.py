"""Linux namespaces of an emulated cluster: how they are made, entered and ended; needs no root.

    python -I benchmarks/cluster/namespaces.py NODE COMMAND ...

runs a command on a node, from within the namespaces: the rsh agent that Open MPI starts others with. Without
arguments it is the process that holds the namespaces. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child")
_USER = ("--user", "--map-root-user")  # root of these namespaces, and this user elsewhere
# The folder stays as it was, and the command is not searched for its own "$0".
_IN_FOLDER = ("sh", "-c", 'cd "$0" && exec "$@"')


class Namespaces:
    """A network, mounts and processes apart from the machine's own, in which this process may do what root may.

    A process holds them until this one closes its end of a pipe, by ``close`` or by ending in whatever way. All that
    runs inside ends with it, and nothing is left: ``/run`` is a file system of their own.

    Args:
        environment: Of what runs inside.

    Raises:
        RuntimeError: This process may not make them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        reasons = []
        # Root that is root of a container only may need a user namespace, too.
        for user in ((), _USER) if os.geteuid() == 0 else (_USER,):
            self._user = ("--user", "--preserve-credentials") if user else ()
            self._holder = subprocess.Popen(
                [*_UNSHARE, *user, sys.executable, "-I", __file__],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for what runs inside
            )
            if self._holder.stdout and (pid := self._holder.stdout.readline().strip()):
                self._pid = pid
                return
            reasons.append(self._holder.communicate()[1].strip())
        raise RuntimeError(
            f"no namespaces for user {os.geteuid()} ({'; '.join(reasons)}): be root, or have root allow "
            "user namespaces (sysctl user.max_user_namespaces, Ubuntu: kernel.apparmor_restrict_unprivileged_userns=0)"
        )

    def enter(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command inside, in the same folder."""
        inside = ("nsenter", "--target", self._pid, *self._user, "--mount", "--net", "--pid")
        return [*inside, *_IN_FOLDER, str(Path.cwd()), *command]

    def run(self, command: Sequence[str], text: str | None = None) -> str:
        """Runs a command inside and returns its output.

        Args:
            command: The command.
            text: Its input.

        Raises:
            RuntimeError: It failed; the message holds its own.
        """
        line = self.enter(command)
        done = subprocess.run(line, env=self._environment, input=text, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def run_all(self, commands: Iterable[Sequence[str]]) -> None:
        """Runs commands inside, one after the other."""
        for command in commands:
            self.run(command)

    def end_processes(self) -> None:
        """Ends everything that runs inside, but for the process that holds the namespaces."""
        with contextlib.suppress(RuntimeError):  # the shell's own end is not worth an error
            self.run(["sh", "-c", "kill -9 -1"])

    def close(self) -> None:
        """Ends everything that runs inside, and the namespaces."""
        self._holder.communicate()


def on(node: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command in a node's network; from within the namespaces."""
    return ["nsenter", f"--net=/run/netns/{node}", *command]


def named(node: str, command: Sequence[str]) -> list[str]:
    """The same under the node's own host name.

    Open MPI takes processes with the same host name for neighbours that share memory.
    """
    return on(node, ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node, *command])


def _hold() -> None:
    """Keeps the namespaces until the other end of standard input is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become children of this process, the first one inside
    print(Path("/proc/self").readlink(), flush=True)  # its number outside, as /proc is the machine's
    sys.stdin.read()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _hold()
    else:
        shell = ["sh", "-c", " ".join(sys.argv[2:])]  # the command is meant for a shell, as with rsh and ssh
        os.execvp("nsenter", named(sys.argv[1], shell))
