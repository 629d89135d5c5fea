"""Benchmarks of kernels, collectives, training steps and convergence. Run them from the repository root."""

from __future__ import annotations

import argparse


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for ``python -m benchmarks.<name>`` whose help is the module's docstring."""
    summary, _, details = str(doc).partition("\n")
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
