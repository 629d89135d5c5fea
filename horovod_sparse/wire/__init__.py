"""Wire formats of sparse entries: pure functions on arrays, independent of MPI and of rules."""

from horovod_sparse.wire.entries import NEVER, Entries, Wire, concatenate
from horovod_sparse.wire.values import DENSE_FORMATS, FORMATS

__all__ = ["DENSE_FORMATS", "FORMATS", "NEVER", "Entries", "Wire", "concatenate"]
