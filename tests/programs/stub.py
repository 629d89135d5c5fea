"""Stands for a rank that `forkserver.py` forks: the process that mpirun starts, watches and signals.

    python -S -E stub.py SOCKET PROGRAM [arguments]

It hands its environment, folder and standard streams to the server, passes on signals to the rank, and ends as the rank
ends. If it is killed, the server kills the rank. Only the standard library is loaded, so that it starts in no time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until there is a rank to pass them on to
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    request = json.dumps(
        {"arguments": sys.argv[2:], "environment": dict(os.environ), "folder": str(Path.cwd())}
    ).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    with server.makefile("r") as answers:
        rank = int(answers.readline())

        def pass_on(number: int, _: Any) -> None:
            os.kill(rank, number)

        for number in SIGNALS:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        status = int(answers.readline())
if status < 0:
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
