"""Common parts of the sparsifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.rules import BucketContext, Stateless, Step
from horovod_sparse.rules.options import RuleOptions, integer
from horovod_sparse.vector import SparseVector


class Base(Stateless):
    """A rule at its place.

    Attributes:
        shares_indices: Tells that all ranks choose the same positions, so that only values need to travel.
        replicated: Tells that the state is the same on every rank, so that another number of ranks can take it over.
        narrows: Tells that a part of a vector can be sent alone.

    Args:
        context: The bucket and the rank.
        options: Of the rule.
    """

    shares_indices = False
    replicated = True
    narrows = True

    def __init__(self, context: BucketContext, options: Any) -> None:
        self._context = context
        self._options = options

    def narrow(self, vector: SparseVector, k: int, step: Step) -> SparseVector:
        """The k largest magnitudes of a vector that was taken."""
        del step
        return vector.cut(k)[0]


_PER_THREAD = 1 << 18  # elements at least: a thread that is started for fewer costs more than it saves


class Fused(Base):
    """A rule whose kernels share their work among threads."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of a rule with fused kernels.

        Attributes:
            threads: Threads of the kernels; the selection does not depend on it. None: as many as the rank has cores to
                itself, and the bucket is large enough for.
        """

        threads: int | None = integer(None, least=1, most=1024, free=True)

    def __init__(self, context: BucketContext, options: Any) -> None:
        super().__init__(context, options)
        self._threads: int = options.threads or max(1, min(context.threads, context.size // _PER_THREAD))


class Random(Base):
    """A rule that draws anew in every step; global generators are neither used nor changed."""

    @dataclass(frozen=True, kw_only=True)
    class Options(RuleOptions):
        """Options of a rule that draws.

        Attributes:
            seed: Of the generator, which is made anew in every step.
        """

        seed: int = integer(0)

    def _draw(self, step: Step, *, shared: bool, level: int = 0) -> np.random.Generator:
        """This step's generator, the same on every rank or this rank's own."""
        return self._context.generator(self._options.seed, step.number, shared=shared, level=level)
