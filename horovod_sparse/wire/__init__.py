"""Formats in which entries travel: pure functions on arrays, without MPI and without rules."""

from __future__ import annotations

from horovod_sparse.wire.entries import FORMATS, Entries, Exact, Rounded, concatenate, wire_for

__all__ = ["FORMATS", "Entries", "Exact", "Rounded", "concatenate", "wire_for"]
