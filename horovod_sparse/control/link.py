"""Messages between the watches of a group's ranks: questions, answers and farewells."""

from __future__ import annotations

import time
from typing import Any

from horovod_sparse.control.report import Snapshot
from horovod_sparse.transport.base import Transport

# Kinds of posted messages.
_ANSWERS, _ASKS, _LEAVES = 7, 8, 9


class Link:
    """Messages over one transport.

    A rank is not asked again before it has answered: one that is stopped finds at most one question of each other rank.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._others = set(range(transport.size)) - {transport.rank}
        self._answers: dict[int, tuple[float, Snapshot]] = {}
        self._unanswered: set[int] = set()

    @property
    def ranks(self) -> list[int]:
        """Ranks in the job."""
        return self._transport.members

    def ask(self) -> None:
        """Ask all other ranks what they are doing."""
        for rank in self._others - self._unanswered:
            self._transport.post(None, rank, _ASKS)
        self._unanswered = set(self._others)

    def answers(self, since: float) -> dict[int, Snapshot | None]:
        """Return answers that came after a time of the monotonic clock, by world rank; None: no answer."""
        recent = {rank: snapshot for rank, (time, snapshot) in self._answers.items() if time >= since}
        return {self.ranks[rank]: recent.get(rank) for rank in self._others}

    def talk(self, mine: Snapshot) -> None:
        """Receive answers, and answer questions with what this process is doing."""
        for rank, _ in self._transport.poll(_ASKS):
            self._transport.post(mine.pack(), rank, _ANSWERS)
        for rank, answer in self._transport.poll(_ANSWERS):
            self._answers[rank] = time.monotonic(), Snapshot.unpack(answer)
            self._unanswered.discard(rank)

    def say_farewell(self, content: Any) -> None:
        """Tell all other ranks that this one leaves."""
        for rank in self._others:
            self._transport.post(content, rank, _LEAVES)

    def farewells(self) -> list[tuple[int, Any]]:
        """Return farewells that have arrived, with the world ranks of those that leave."""
        return [(self.ranks[rank], content) for rank, content in self._transport.poll(_LEAVES)]
