"""How a sparsifier lets all ranks decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from horovod_sparse.kernels.types import Array

# Sums a small array over the ranks; the identity on one rank.
Consensus: TypeAlias = Callable[[Array], Array]
