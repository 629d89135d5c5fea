"""The command `horovod-sparse`. Each subcommand is a module with `add_parser`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from horovod_sparse import __version__
from horovod_sparse.cli import advise, bench, check, checkpoint, report

_COMMANDS = (check, advise, bench, checkpoint, report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand, and return the exit status, 0 for success; by default with this process's arguments."""
    parser = argparse.ArgumentParser(prog="horovod-sparse", description="Tools for sparse gradient exchange.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status
