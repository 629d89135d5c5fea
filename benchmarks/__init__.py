"""Benchmarks of the kernels, of the collectives on an emulated cluster, and of convergence; start in the root."""

from __future__ import annotations

import argparse


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser for ``python -m benchmarks.<name>`` that shows the module's docstring."""
    summary, _, details = str(doc).partition("\n")
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
