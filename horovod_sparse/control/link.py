"""Messages between the watches of a communicator's ranks: questions, answers and farewells."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

from mpi4py import MPI

from horovod_sparse.control.report import Snapshot

# Messages of collectives, on the same communicator, have lower tags.
_LEAVES = 32767  # the largest tag that every MPI allows
_ASKS = 32766
_ANSWERS = 32765


class Link:
    """Messages over one communicator.

    A rank is not asked again before it has answered: one that is stopped finds at most one question of each other rank.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._others = set(range(comm.Get_size())) - {comm.Get_rank()}
        self._answers: dict[int, tuple[float, Snapshot]] = {}
        self._unanswered: set[int] = set()
        self._sending: list[MPI.Request] = []

    @cached_property
    def ranks(self) -> list[int]:
        """World ranks of the communicator's ranks."""
        return world_ranks(self._comm)

    def ask(self) -> None:
        """Ask all other ranks what they are doing."""
        for rank in self._others - self._unanswered:
            self._send(None, rank, _ASKS)
        self._unanswered = set(self._others)

    def answers(self, since: float) -> dict[int, Snapshot | None]:
        """Return answers that came after a time of the monotonic clock, by world rank; None: no answer."""
        recent = {rank: snapshot for rank, (time, snapshot) in self._answers.items() if time >= since}
        return {self.ranks[rank]: recent.get(rank) for rank in self._others}

    def talk(self, mine: Snapshot) -> None:
        """Receive answers, and answer questions with what this process is doing."""
        self._sending = [request for request in self._sending if not request.Test()]
        for rank, _ in self._received(_ASKS):
            self._send(mine.pack(), rank, _ANSWERS)
        for rank, answer in self._received(_ANSWERS):
            self._answers[rank] = time.monotonic(), Snapshot.unpack(answer)
            self._unanswered.discard(rank)

    def say_farewell(self, content: Any) -> None:
        """Tell all other ranks that this one leaves."""
        for rank in self._others:
            self._comm.send(content, rank, _LEAVES)  # messages as short as this are sent without waiting

    def farewells(self) -> list[tuple[int, Any]]:
        """Return farewells that have arrived, with the world ranks of those that leave."""
        return [(self.ranks[rank], content) for rank, content in self._received(_LEAVES)]

    def _received(self, tag: int) -> list[tuple[int, Any]]:
        messages, status = [], MPI.Status()
        # Matched probes: another thread may look for farewells at the same time.
        while (message := self._comm.improbe(MPI.ANY_SOURCE, tag, status)) is not None:
            messages.append((status.Get_source(), message.recv()))
        return messages

    def _send(self, content: Any, rank: int, tag: int) -> None:
        self._sending.append(self._comm.isend(content, rank, tag))  # never waits: the other rank may be stopped


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks in ``MPI.COMM_WORLD`` of a communicator's ranks."""
    return comm.Get_group().Translate_ranks(None, MPI.COMM_WORLD.Get_group())
