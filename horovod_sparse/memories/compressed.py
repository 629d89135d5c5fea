"""Parts of the memories that compress the error: their options and the choice of the error compressor."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_sparse.memories.quantize import Quantization
from horovod_sparse.memories.sketch import CountSketch
from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.options import RuleOptions, integer, number, one_of


@dataclass(frozen=True, kw_only=True)
class CompressedOptions(RuleOptions):
    """Options of a memory that compresses its error.

    Attributes:
        compressor: ``sketch`` for a count sketch, ``quantize`` for stochastic quantization.
        saving: Fraction of a residual's memory that a sketch saves, in (0, 1).
        rows: Number of hash functions of a sketch: 1, 3 or 5.
        bits: Bits per quantized element: 4, 8 or 16.
        seed: Seed of the sketch's hash or of the random rounding.
    """

    compressor: str = one_of("sketch", "sketch", "quantize")
    saving: float = number(0.6, above=0, below=1, hint="0.6 keeps a sketch of 40 % of the residual's size")
    rows: int = one_of(1, 1, 3, 5, hint="a value is the median over the rows")
    bits: int = one_of(8, 4, 8, 16)
    seed: int = integer(0)

    def conflict(self, sparsifier: RuleOptions, collective: RuleOptions) -> str:
        """Refuse a sketch unless positions are random: it is unbiased only if they do not depend on its values."""
        if self.compressor != "sketch" or (sparsifier.random_positions and collective.shared_indices):
            return ""
        return (
            "a sketch needs random positions that are applied on all ranks, because selection by magnitude favors "
            "entries that the sketch overestimates: use compressor='quantize', or sparsifier randomblock or randomk "
            "with collective 'shared'"
        )


def compressor_for(context: BucketContext, options: CompressedOptions, part: int = 0) -> CountSketch | Quantization:
    """Create the error compressor that the options name; several in one bucket differ in ``part``.

    An error compressor holds an unbiased approximation of a vector of the bucket's size, in less memory.

    Raises:
        ValueError: The bucket is too small for a sketch.
    """
    if options.compressor == "sketch":
        return CountSketch(context, options.saving, options.rows, options.seed, part)
    return Quantization(context, options.bits, options.seed, part)
