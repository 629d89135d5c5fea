"""Partial error feedback: a part of the error stays behind, so that the rest can be compressed more (ConEF)."""

from __future__ import annotations

from horovod_sparse.memories.contractive import Contractive
from horovod_sparse.place import Place


class Partial(Contractive):
    """p = g + (1 - beta) e and e' = C(beta e + p - D): noise of the compressor is fed back less.

    Args:
        place: The bucket and the rank.
        beta: Share of the error that is not fed back in a step, in (0, 1].
        compressor: As for ``Contractive``, and so are the others.
        saving: Share of a residual's memory that a sketch saves, in (0, 1).
        rows: Hashes of the sketch, 1, 3 or 5.
        bits: Bits per element of the quantization, 4 or 8.
        seed: Of the hash or of the rounding.

    Raises:
        ValueError: beta is out of range, or an option of the error compressor.
    """

    def __init__(
        self,
        place: Place,
        *,
        beta: float = 0.5,
        compressor: str = "sketch",
        saving: float = 0.6,
        rows: int = 1,
        bits: int = 8,
        seed: int = 0,
    ) -> None:
        if not 0 < beta <= 1:
            raise ValueError(f"beta must be in (0, 1], not {beta}: it is the share of the error that stays behind")
        super().__init__(place, compressor=compressor, saving=saving, rows=rows, bits=bits, seed=seed)
        self._beta = beta
