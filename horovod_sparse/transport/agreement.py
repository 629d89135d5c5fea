"""Comparison of facts that must be equal on all ranks, before any exchange: ranks that differ would hang."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from horovod_sparse.transport.base import Transport


def agree(transport: Transport, mine: Mapping[str, Any] | Exception) -> None:
    """Check that all ranks hold the same facts, or raise on every rank. A collective operation.

    Args:
        transport: Transport of the ranks to compare.
        mine: Facts of this rank by name, or the error raised while collecting them.

    Raises:
        ValueError: The facts differ between ranks, or another rank had an error.
        Exception: The error of this rank.
    """
    rank, error = transport.rank, isinstance(mine, Exception)
    # Compare digests with rank 0's first: facts of large models are long, and there may be many ranks.
    digest = None if error else hashlib.sha256(repr(mine).encode()).digest()
    digest_of_first = transport.broadcast_object(digest)
    if not transport.anywhere(error or digest != digest_of_first):
        return
    errors = transport.allgather_object(str(mine) if error else None)
    if isinstance(mine, Exception):
        raise mine
    for other, theirs in enumerate(errors):
        if theirs is not None:
            raise ValueError(f"rank {rank}: rank {other} could not begin: {theirs.removeprefix(f'rank {other}: ')}")
    first = transport.broadcast_object(mine)
    differences = [_difference(fact, rank, mine[fact], first[fact]) for fact in first if mine[fact] != first[fact]]
    for difference in filter(None, transport.allgather_object(differences[0] if differences else None)):
        raise ValueError(f"rank {rank}: {difference}")


def _difference(fact: str, rank: int, theirs: Any, first: Any) -> str:
    if isinstance(theirs, dict) and isinstance(first, dict) and theirs.keys() == first.keys():
        name = next(name for name in first if theirs[name] != first[name])
        return _difference(f"{fact}.{name}", rank, theirs[name], first[name])
    if isinstance(theirs, tuple) and isinstance(first, tuple):
        pairs = [(a, b) for a, b in zip(theirs, first, strict=False) if a != b]
        theirs, first = pairs[0] if pairs else (f"{len(theirs)} items", f"{len(first)}")
    return f"{fact} differs between ranks: rank {rank} has {theirs}, rank 0 has {first}: give every rank the same"
