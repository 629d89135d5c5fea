"""What a contractive memory holds its error in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod_sparse.kernels.types import Array, Indices
from horovod_sparse.memories.countsketch import CountSketch
from horovod_sparse.memories.quantization import Quantization
from horovod_sparse.place import Place


class ErrorCompressor(Protocol):
    """Holds an approximation of a vector of the bucket's size, right in expectation, in less memory."""

    def rescale(self, factor: float) -> None:
        """Multiplies what is held; 0 forgets it."""
        ...

    def decode(self, buffer: Array, factor: float) -> None:
        """Sets the buffer to factor * what is held."""
        ...

    def add_to(self, buffer: Array, factor: float) -> None:
        """Adds factor * what is held to the buffer."""
        ...

    def update(self, buffer: Array, delivered: Indices, carried: float) -> None:
        """Holds the buffer, and the part 1 - carried of what was held. Where that is none, the buffer stays as it is.

        Args:
            buffer: Shape (n,). It was made out of ``carried`` times what is held.
            delivered: Positions that have left the buffer since, int32, ascending; there it holds what came back.
            carried: In [0, 1].
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that is held."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        ...

    def merge(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of what several states hold together, all of them with NumPy arrays; of nothing for none."""
        ...


def make(
    place: Place, compressor: str, *, saving: float, rows: int, bits: int, seed: int, number: int = 0
) -> ErrorCompressor:
    """An error compressor by name.

    Args:
        place: The bucket and the rank.
        compressor: ``sketch`` or ``quantize``.
        saving: Of the sketch.
        rows: Of the sketch.
        bits: Of the quantization.
        seed: Of either.
        number: Tells those of one bucket apart.

    Raises:
        ValueError: The name is unknown or an option is out of range.
    """
    if compressor == "sketch":
        return CountSketch(place, saving, rows, seed, number)
    if compressor == "quantize":
        return Quantization(place, bits, seed, number)
    raise ValueError(f"unknown error compressor {compressor!r}; known are: sketch, quantize")
