"""Benchmarks of kernels, collectives, training steps and convergence. Run them from the repository root."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for ``python -m benchmarks.<name>`` whose help is the module's docstring."""
    summary, _, details = str(doc).partition("\n")
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def subcommand(
    commands: Any, name: str, summary: str, doc: str | None, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add a subcommand that calls ``run`` and whose help is the module's docstring; return its parser."""
    with_defaults = argparse.ArgumentDefaultsHelpFormatter
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=doc, formatter_class=with_defaults
    )
    parser.set_defaults(run=run)
    return parser


def single_rank() -> Any:
    """Return a transport of one rank, which needs no MPI."""
    from horovod_sparse.transport.in_process import run_ranks

    return run_ranks(1, lambda transport: transport)[0]


def power_sgd(model: Any, rank: int = 4, start: int = 2) -> tuple[Any, Any]:
    """Return a model in DistributedDataParallel over Gloo with torch's PowerSGD hook, and the state of the hook.

    All gradients form one bucket, because over Gloo the hook mixes up the collectives of several buckets.

    Args:
        model: The model.
        rank: Rank of the approximation.
        start: First step that is compressed.
    """
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    from horovod_sparse import ddp

    if not torch.distributed.is_initialized():
        ddp.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1 << 14)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped, state


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose columns are aligned right, except the first ``left``."""
    rules = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows))
