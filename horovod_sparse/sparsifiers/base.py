"""What the sparsifiers have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_sparse.place import Place


class Base:
    """Knows its place, and how many threads its kernels may use.

    Attributes:
        shares_indices: Whether all ranks choose the same positions, so that only values need to travel.
        replicated: Whether the state is the same on every rank, so that another number of ranks can take it over.

    Args:
        place: The bucket and the rank.
        threads: Threads of the kernels; the selection does not depend on it.

    Raises:
        ValueError: threads is below 1.
    """

    shares_indices = False
    replicated = True

    def __init__(self, place: Place, *, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._place = place
        self._threads = threads


class Random(Base):
    """Draws anew in every step, from a generator of its own; global generators are neither used nor changed.

    Args:
        place: The bucket and the rank.
        seed: Of the generator.
        threads: As for ``Base``.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(self, place: Place, *, seed: int = 0, threads: int = 1) -> None:
        super().__init__(place, threads=threads)
        self._seed = whole_number("seed", seed, least=0)
        self._step = 0

    def _draw(self, *, shared: bool) -> np.random.Generator:
        """This step's generator, the same on every rank or this rank's own; the next call is the next step's."""
        generator = self._place.generator(self._seed, self._step, shared=shared)
        self._step += 1
        return generator

    def state_dict(self) -> dict[str, Any]:
        """The number of the step, which with the seed names the next draw."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        self._step = int(state["step"])


def whole_number(name: str, value: object, least: int) -> int:
    """The value of an option, checked.

    Raises:
        ValueError: It is no whole number, or below the least one allowed.
    """
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value
