"""`horovod-sparse checkpoint FOLDER`: List, verify and prune the checkpoints in a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import CheckpointError
from horovod_sparse.cli.units import at_least


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    parser = subparsers.add_parser(
        "checkpoint",
        help="list, verify and prune checkpoints",
        description="List, verify and prune the checkpoints in a folder, newest first. Works without MPI.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of hvs.checkpoint.Checkpoints")
    parser.add_argument("--verify", action="store_true", help="read all files and compare their SHA-256")
    parser.add_argument(
        "--prune",
        type=at_least(1),
        metavar="KEEP",
        help="delete all but the newest KEEP checkpoints, and the leftovers of interrupted saves",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table; return 1 if a checkpoint is damaged or the folder cannot be read or pruned, and 0 otherwise."""
    folder = Folder(options.folder)
    try:
        if not options.folder.is_dir():
            raise CheckpointError(f"{options.folder} is not a folder")
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
    """Return step, size, ranks, digest and state of each checkpoint, newest first; unreadable ones come last.

    With ``verify``, the content of all files is compared; otherwise only their presence and lengths are checked.
    """
    listed, damaged = [], []
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
        listed.append((manifest.number, (str(step), size, str(manifest.ranks), manifest.digest, state)))
    return [row for _, row in sorted(listed, reverse=True)] + damaged
