"""Formats in which entries travel: pure functions on arrays, without MPI and without rules."""

from __future__ import annotations

from horovod_sparse.wire.entries import NEVER, Entries, Rounding, Wire, concatenate
from horovod_sparse.wire.values import FORMATS

__all__ = ["FORMATS", "NEVER", "Entries", "Rounding", "Wire", "concatenate"]
