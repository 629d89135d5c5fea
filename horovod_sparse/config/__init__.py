"""Configuration of the exchange. Importing it needs neither MPI nor torch."""

from horovod_sparse.config.presets import Compression
from horovod_sparse.config.sparse import Sparse, register
from horovod_sparse.config.text import parse

__all__ = ["Compression", "Sparse", "parse", "register"]
