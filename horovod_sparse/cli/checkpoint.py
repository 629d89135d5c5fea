"""`horovod-sparse checkpoint FOLDER`: the checkpoints in a folder, whether they are whole, and which are deleted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from horovod_sparse.checkpoint.errors import CheckpointError
from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.cli.units import at_least


def add_parser(subparsers: Any) -> None:
    """Adds this subcommand."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="list, verify and prune checkpoints",
        description="Lists the checkpoints in a folder, the one that was saved last at the top. Needs no MPI.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="as hvs.checkpoint.Checkpoints has it")
    parser.add_argument("--verify", action="store_true", help="read all files, and compare them with their SHA-256")
    parser.add_argument(
        "--prune", type=at_least(1), metavar="KEEP", help="delete all but so many, and what interrupted saves have left"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the table; returns 1 where a checkpoint is damaged or the folder cannot be read or pruned."""
    folder = Folder(options.folder)
    try:
        if not options.folder.is_dir():
            raise CheckpointError(f"{options.folder} is no folder")
        if options.prune is not None:
            folder.prepare()
            for manifest in folder.prune(options.prune):
                print(f"deleted step {manifest.step}")
        rows = list_folder(folder, options.verify)
    except (CheckpointError, OSError) as error:
        print(f"horovod-sparse checkpoint: {error}", file=sys.stderr)
        return 1
    print(f"{'step':>10} {'MiB':>10} {'ranks':>6}  {'digest':64}  state")
    for row in rows:
        print("{:>10} {:>10} {:>6}  {:64}  {}".format(*row))
    return 0 if all(row[-1] in ("complete", "verified") for row in rows) else 1


def list_folder(folder: Folder, verify: bool) -> list[tuple[str, str, str, str, str]]:
    """Step, size, ranks, digest and state of each checkpoint, newest first, damaged ones at the end.

    Args:
        folder: Of the checkpoints.
        verify: Whether to read the files; otherwise only that they are there, with their lengths, is made sure.
    """
    whole, damaged = [], []
    for step in folder.steps():
        try:
            manifest = folder.manifest(step)
        except (CheckpointError, OSError) as error:
            damaged.append((str(step), "", "", "", str(error)))
            continue
        try:
            manifest.verify(folder.place(step), content=verify)
            state = "verified" if verify else "complete"
        except (CheckpointError, OSError) as error:
            state = str(error)
        size = f"{manifest.size / 2**20:.1f}"
        whole.append((manifest.number, (str(step), size, str(manifest.ranks), manifest.digest, state)))
    return [row for _, row in sorted(whole, reverse=True)] + damaged
