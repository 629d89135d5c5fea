"""Shell scripts that replace programs of the machine."""

from __future__ import annotations

from pathlib import Path


def put_program(path: Path, script: str) -> Path:
    """Write an executable shell script, with the folders above it; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def forbid_namespaces(folder: Path) -> None:
    """Write an ``unshare`` that fails like that of a kernel without user namespaces."""
    put_program(folder / "unshare", "echo unshare: Operation not permitted >&2\nexit 1")
