"""Memories in compressed form: their options, and the protocol of error compressors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.memories.quantize import Quantization
from horovod_sparse.memories.sketch import CountSketch
from horovod_sparse.rules import BucketContext
from horovod_sparse.rules.options import RuleOptions, integer, number, one_of


class ErrorCompressor(Protocol):
    """Holds an approximation of a vector of the bucket's size, right in expectation, in less memory.

    Attributes:
        carries: Tells that an update leaves what was read where it is, and adds only what is new.
    """

    carries: bool

    def rescale(self, factor: float) -> None:
        """Multiplies what is held; 0 forgets it."""
        ...

    def decode(self, buffer: Array, factor: float) -> None:
        """Sets the buffer to factor * what is held."""
        ...

    def add_to(self, buffer: Array, factor: float) -> None:
        """Adds factor * what is held to the buffer."""
        ...

    def update(self, buffer: Array, delivered: Indices, carried: float, step: int) -> None:
        """Holds the buffer, and the part 1 - carried of what was held. Where that is none, the buffer stays as it is.

        Args:
            buffer: Shape (n,). It was made out of ``carried`` times what is held.
            delivered: Positions that have left the buffer since, int32, ascending; there it holds what came back.
            carried: In [0, 1].
            step: Number of the step, which names its random numbers.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that is held."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of several states together, all of them with NumPy arrays; of nothing for none."""
        ...


@dataclass(frozen=True, kw_only=True)
class CompressedOptions(RuleOptions):
    """Options of a memory that compresses its error.

    Attributes:
        compressor: ``sketch``, a count sketch, or ``quantize``, stochastic quantization.
        saving: Share of a residual's memory that a sketch saves, in (0, 1).
        rows: Hashes of the sketch, 1, 3 or 5.
        bits: Bits per element of the quantization, 4 or 8.
        seed: Of the hash or of the rounding.
    """

    compressor: str = one_of("sketch", "sketch", "quantize")
    saving: float = number(
        0.6, lambda x: 0 < x < 1, "in (0, 1)", hint="0.6 keeps a sketch of 40 % of the residual's size"
    )
    rows: int = one_of(1, 1, 3, 5, hint="their median is taken")
    bits: int = one_of(8, 4, 8)
    seed: int = integer(0)

    def conflict(self, sparsifier: RuleOptions, collective: RuleOptions) -> str:
        """Refuse a sketch unless positions are random: it is unbiased only where they do not depend on its values."""
        if self.compressor != "sketch" or (sparsifier.random_positions and collective.shared_indices):
            return ""
        return (
            "a sketch needs random positions that are applied on all ranks, as selection by magnitude prefers what the "
            "sketch overestimates: use compressor='quantize', or sparsifier randomblock or randomk with collective "
            "'shared'"
        )


def compressor_for(context: BucketContext, options: CompressedOptions, part: int = 0) -> ErrorCompressor:
    """The error compressor that options name.

    Args:
        context: The bucket and the rank.
        options: Of the memory.
        part: Tells those of one bucket apart.

    Raises:
        ValueError: The bucket is too small for a sketch.
    """
    if options.compressor == "sketch":
        return CountSketch(context, options.saving, options.rows, options.seed, part)
    return Quantization(context, options.bits, options.seed, part)
