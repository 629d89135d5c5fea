"""Common parts of the sparsifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.rules import BucketContext, Stateless, Step
from horovod_sparse.rules.options import RuleOptions, integer
from horovod_sparse.vector import SparseVector


class Base(Stateless):
    """Base class of the sparsifiers, with the attributes that most of them have."""

    shares_indices = False
    replicated = True
    narrows = True

    def __init__(self, context: BucketContext, options: Any) -> None:
        self._context = context
        self._options = options

    def observe(self, total: SparseVector) -> None:
        """Ignore the total: the next selection does not depend on it."""

    def narrow(self, vector: SparseVector, k: int, step: Step) -> SparseVector:
        """Return the k largest magnitudes of a vector that was taken."""
        del step
        return vector.cut(k)[0]


_PER_THREAD = 1 << 18  # least elements per thread: with fewer, starting a thread costs more than it saves


class Fused(Base):
    """Base class of rules with fused, multithreaded kernels."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of a rule with fused kernels.

        Attributes:
            threads: Number of kernel threads; the selection does not depend on it. None: the number of cores that the
                rank has to itself, or fewer for a small bucket.
        """

        threads: int | None = integer(None, least=1, most=1024, free=True)

    def __init__(self, context: BucketContext, options: Any) -> None:
        super().__init__(context, options)
        self._threads: int = options.threads or max(1, min(context.threads, context.size // _PER_THREAD))


class Random(Base):
    """Base class of randomized rules, which neither use nor change global generators."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of a randomized rule.

        Attributes:
            seed: Seed of the generator, which is created in every step.
        """

        seed: int = integer(0)

    def _draw(self, step: Step, *, shared: bool, level: int = 0) -> np.random.Generator:
        """Return the generator of this step, either the same on every rank or a different one on each."""
        return self._context.generator(self._options.seed, step.number, shared=shared, level=level)
