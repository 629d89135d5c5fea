"""Partial error feedback: feeds back a part of the error per step, so that it can be compressed more (ConEF)."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.memories.compressed import CompressedOptions
from horovod_sparse.memories.conef import Contractive
from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.options import number


class Partial(Contractive):
    """Partial error feedback, p = g + (1 - beta) e and e' = C(beta e + p - D): feeds back less compression noise."""

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Options of partial error feedback.

        Attributes:
            beta: Share of the error that is not fed back in a step, in (0, 1). With 1, nothing would be fed back, and
                the error would grow without bound.
        """

        beta: float = number(
            0.5,
            above=0,
            below=1,
            hint="it is the share of the error that is not fed back, and with 1 the error would grow without bound",
        )

    def __init__(self, context: BucketContext, options: Options) -> None:
        super().__init__(context, options)
        self._beta = options.beta
