"""Partial error feedback: a part of the error stays behind, so that the rest can be compressed more (ConEF)."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.memories.compressed import CompressedOptions
from horovod_sparse.memories.conef import Contractive
from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.options import number


class Partial(Contractive):
    """p = g + (1 - beta) e and e' = C(beta e + p - D): noise of the compressor is fed back less."""

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Options of partial error feedback.

        Attributes:
            beta: Share of the error that is not fed back in a step, in (0, 1). Of 1, nothing would ever be fed back,
                and the error would grow without bound.
        """

        beta: float = number(
            0.5,
            lambda x: 0 < x < 1,
            "in (0, 1)",
            hint="it is the share of the error that stays behind, and an error of which nothing is fed back grows for "
            "ever",
        )

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(context, options)
        self._beta = options.beta
