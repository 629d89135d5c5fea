"""Messages between the watches of a group's ranks: queries, answers and farewells."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from horovod_sparse.control.report import Snapshot
from horovod_sparse.transport.base import Transport

# Mailboxes of `Transport.post`.
_ANSWERS, _ASKS, _LEAVES = 7, 8, 9


class Link:
    """Messages of the watch over one transport.

    A rank is not queried again before it has answered. A stopped rank therefore accumulates at most one query of each
    other rank.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport.mailboxes()  # an exchange that ends closes its connection
        self._others = set(range(transport.size)) - {transport.rank}
        self._answers: dict[int, tuple[float, Snapshot]] = {}
        self._unanswered: set[int] = set()

    @property
    def ranks(self) -> list[int]:
        """World ranks of the group's members, by rank in the group."""
        return self._transport.members

    def ask(self, ranks: Iterable[int]) -> None:
        """Query the activity of members, given by their world ranks."""
        numbers = {world: rank for rank, world in enumerate(self.ranks)}
        asked = {numbers[world] for world in ranks} - {self._transport.rank}
        for rank in asked - self._unanswered:
            self._transport.post(None, rank, _ASKS)
        self._unanswered |= asked

    def answers(self, since: float) -> dict[int, Snapshot | None]:
        """Return the answers received since a time of the monotonic clock, by world rank; None: no answer."""
        recent = {rank: snapshot for rank, (time, snapshot) in self._answers.items() if time >= since}
        return {self.ranks[rank]: recent.get(rank) for rank in self._others}

    def talk(self, mine: Snapshot) -> None:
        """Receive answers, and answer the queries of other ranks with this process's snapshot."""
        for rank, _ in self._transport.poll(_ASKS):
            self._transport.post(mine, rank, _ANSWERS)
        for rank, answer in self._transport.poll(_ANSWERS):
            self._answers[rank] = time.monotonic(), answer
            self._unanswered.discard(rank)

    def say_farewell(self, content: Any) -> None:
        """Announce that this rank leaves, to the ranks at distances of 1, 2, 4 and so on in both directions.

        Where some ranks of the group have left and the others wait for them, one of the others is the neighbor of one
        that has left, and ends the job.
        """
        distances = [sign << bit for bit in range((self._transport.size - 1).bit_length()) for sign in (1, -1)]
        for rank in {(self._transport.rank + distance) % self._transport.size for distance in distances}:
            if rank != self._transport.rank:
                self._transport.post(content, rank, _LEAVES)

    def farewells(self) -> list[tuple[int, Any]]:
        """Return the world rank and the content of each farewell that has arrived."""
        return [(self.ranks[rank], content) for rank, content in self._transport.poll(_LEAVES)]
