"""Runs a command on a node of the emulated cluster; as a program, it is the rsh agent that Open MPI starts others with.

    python -I benchmarks/on_node.py NODE COMMAND ...

``-I`` keeps this folder off the path, where ``select.py`` would hide the standard library's ``select``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def enter(node: str, command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` in a node's network namespace, under the node's own host name.

    Open MPI takes processes with the same host name for neighbours that share memory.
    """
    named = 'hostname "$0" && exec "$@"'
    return ["ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", named, node, *command]


if __name__ == "__main__":
    shell = ["sh", "-c", " ".join(sys.argv[2:])]  # the command is meant for a shell, as with rsh and ssh
    os.execvp("ip", enter(sys.argv[1], shell))
