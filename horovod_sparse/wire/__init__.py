"""Wire formats of sparse entries: pure functions on arrays, independent of MPI and of rules."""

from horovod_sparse.wire.entries import NEVER, Entries, Wire, concatenate
from horovod_sparse.wire.values import FORMATS

__all__ = ["FORMATS", "NEVER", "Entries", "Wire", "concatenate"]
