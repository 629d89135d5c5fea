"""One fragment of a model that takes local steps: its common parameters, and how far this rank is from them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Limits
from horovod_sparse.engine.device import Mark, device_of
from horovod_sparse.frontends.local_sgd.differences import CALL, Differences, Outcome, Values, digest_of
from horovod_sparse.frontends.local_sgd.outer import OuterSGD
from horovod_sparse.frontends.local_sgd.schedule import Schedule
from horovod_sparse.frontends.shards import shard_of
from horovod_sparse.transport.base import Transport


@dataclass(eq=False)
class Transfer:
    """An exchange in flight, or one whose result is in the common parameters, but not yet in this rank's own.

    Attributes:
        left: Local steps until it is applied.
        starts: Parameters of this rank when it began.
        differences: What was given, then the mean of what was sent; None: it is in the common parameters.
        moving: Parameters that it changes.
        outcome: Resolved at the end of the exchange.
    """

    left: int
    starts: Values = field(default_factory=dict)
    differences: Values | None = None
    moving: Sequence[torch.Tensor] = ()
    outcome: Future[Outcome] | None = None


class Fragment:
    """Parameters that are exchanged together.

    Args:
        sparse: The configuration.
        transport: Transport of the ranks that take part; used by this fragment only.
        outer: Settings of the outer step.
        schedule: Settings of the exchange.
        stall: Limits of the wait for a bucket.

    Attributes:
        exchange: Exchange of the differences, with their residuals.
        common: Common parameters theta of those in ``apart``, the same on every rank. Any other parameter is common
            itself, and its entry an old buffer.
        base: Parameters from which this rank's change counts, where they are not the common ones (alpha below 1).
        velocity: Momentum of the outer step.
        apart: Parameters that may differ between ranks.
        stepped: Whether this rank has taken a step since the last exchange began.
        transfer: The exchange that is not yet applied.
    """

    def __init__(
        self, sparse: Sparse, transport: Transport, outer: OuterSGD, schedule: Schedule, stall: Limits
    ) -> None:
        self.exchange = Differences(sparse, transport, stall, schedule.needs_synchronize)
        self.common: Values = {}
        self.base: Values = {}
        self.velocity: Values = {}
        self.apart: set[torch.Tensor] = set()
        self.stepped = False
        self.transfer: Transfer | None = None
        self._saved: dict[torch.Tensor, Mark] = {}  # after ``common`` was written
        self._outer = outer
        self._schedule = schedule
        self._thread = process.background("horovod_sparse_transfer", CALL)

    @property
    def names(self) -> Mapping[torch.Tensor, str]:
        """Names of the parameters."""
        return self.exchange.names

    def add(self, names: Mapping[torch.Tensor, str]) -> None:
        """Add parameters, in the same order on every rank; a collective call."""
        self.exchange.names |= names
        self.exchange.create_buckets(p for p in names if p.requires_grad)

    def before_step(self) -> None:
        """Save the common parameters; to be called before each step.

        A frozen parameter that still has a gradient is moved by optimizers of torch.
        """
        self.exchange.require_intact()
        for p in self.names:
            if p not in self.apart and (p.requires_grad or p.grad is not None):
                self.save(p)

    def save(self, p: torch.Tensor) -> None:
        """Take a parameter's values as the common ones, from which ranks now move apart."""
        values = shard_of(p.detach())
        self.take_common(p, self.common[p].copy_(values) if p in self.common else values.clone())
        self.base.pop(p, None)

    def take_common(self, p: torch.Tensor, values: torch.Tensor) -> None:
        """Take values as the common ones of a parameter, from which this rank's differ."""
        device = device_of(p.device)
        self.common[p], self._saved[p] = values, device.mark(device.stream())
        self.apart.add(p)

    def velocity_of(self, p: torch.Tensor) -> torch.Tensor:
        """Return the momentum of the outer step."""
        if p not in self.velocity:
            self.velocity[p] = torch.zeros_like(shard_of(p.detach()))
        return self.velocity[p]

    def _base_of(self, p: torch.Tensor) -> torch.Tensor:
        return self.base.get(p, self.common[p])

    def _given(self) -> set[torch.Tensor]:
        """Return parameters that this rank may train, or that have moved before they were frozen."""
        frozen = [p for p in self.apart if not p.requires_grad]
        moved = {p for p in frozen if not torch.equal(self._base_of(p), shard_of(p.detach()))}
        return moved | {p for p in self.names if p.requires_grad}

    @torch.no_grad()
    def unite(self, working: bool, ending: bool) -> Outcome:
        """Exchange now; the parameters then have the same bits on every rank. A collective call.

        Nothing is exchanged if no rank has taken a step.

        Args:
            working: Whether this rank will take further steps.
            ending: Whether it has called ``synchronize()``.
        """
        self.finish()
        given = self._given()
        outcome = self.exchange.outcome(working, ending, self.stepped, given)
        for p in outcome.moving:
            if p not in self.apart:
                self.save(p)
        self.exchange.compare(outcome.moving, self._digest_at_start)
        try:
            if outcome.moving:  # differences are written into the parameters, whose values are no longer needed
                values = {p: shard_of(p.detach()) for p in outcome.moving}
                differences = {p: torch.sub(self._base_of(p), value, out=value) for p, value in values.items()}
                self.exchange.idle, self.exchange.overlaps = not self.stepped, False
                self.exchange.mean(differences, outcome.moving, given)
                self._step(differences, outcome.moving)
        finally:
            for p in {*outcome.moving, *self.base}:
                shard_of(p.detach()).copy_(self.common[p])
        self.mark_common()
        return outcome

    def mark_common(self) -> None:
        """Note that the parameters are the common ones again, and that nothing is in flight."""
        self.apart.clear()
        self.base.clear()
        self.stepped, self.transfer = False, None

    @torch.no_grad()
    def start(self) -> None:
        """Begin an exchange that local steps overlap; the other ranks must do so after the same step."""
        self.finish()  # one that is not due yet, if the round has become shorter
        given, stepped, exchange = self._given(), self.stepped, self.exchange
        starts = {p: shard_of(p.detach()).clone() for p in given}
        differences = {p: self._base_of(p) - start for p, start in starts.items()}
        marks = [(one, one.mark(one.stream())) for one in {device_of(p.device) for p in self.names}]
        exchange.idle, exchange.overlaps, exchange.waits_since = not stepped, True, 0

        def run() -> Outcome:
            with ExitStack() as streams:
                for device, mark in marks:
                    streams.enter_context(device.work(after=[mark]))
                outcome = exchange.outcome(True, False, stepped, given)
                exchange.compare(outcome.moving, self._digest_at_start)
                if outcome.moving:
                    exchange.mean(differences, outcome.moving, given)
            return outcome

        self.stepped = False
        self.transfer = Transfer(self._schedule.delay, starts, differences, outcome=self._thread.submit(run))

    def _digest_at_start(self, p: torch.Tensor) -> str:
        """Return the digest of a parameter's common values, before the outer step; during local steps, too."""
        if p not in self.apart:
            digest = digest_of(shard_of(p.detach()))
            if p not in self.apart:
                return digest
        # A step that has moved the parameter meanwhile has saved it before.
        with device_of(p.device).work(after=[self._saved[p]]):
            return digest_of(self.common[p])

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the exchange, and take the outer step on the common parameters."""
        transfer = self.transfer
        if transfer is None or transfer.differences is None:
            return
        assert transfer.outcome is not None
        self.exchange.waits_since = time.perf_counter_ns()
        try:
            transfer.moving = transfer.outcome.result().moving
        except Exception:
            self.transfer = None
            raise
        finally:
            for device in {device_of(p.device) for p in self.names}:
                device.follow()
        for p in transfer.moving:
            if p not in self.apart:
                self.save(p)
            if p not in transfer.starts:  # not trained here when it began
                transfer.starts[p] = self._base_of(p).clone()
        self._step(transfer.differences, transfer.moving)
        for difference in transfer.differences.values():
            if difference.is_cuda:  # the other stream may have made it, for a parameter that is frozen here
                difference.record_stream(torch.cuda.current_stream(difference.device))
        transfer.differences = transfer.outcome = None

    @torch.no_grad()
    def finish(self) -> None:
        """Apply the exchange to this rank's parameters; what it has moved since the exchange began counts once.

        From theta, the new common parameters, and x, those of this rank when the exchange began, it continues from the
        base b = x + alpha (theta - x), plus what it has moved since. The next difference counts from b.
        """
        self.settle()
        for p in () if self.transfer is None else self.transfer.moving:
            assert self.transfer is not None
            value, start = shard_of(p.detach()), self.transfer.starts[p]
            if self._schedule.alpha < 1:
                self.base[p] = torch.lerp(start, self.common[p], self._schedule.alpha)
            else:  # one of a checkpoint that was saved with alpha below 1
                self.base.pop(p, None)
            torch.sub(value, start, out=value).add_(self._base_of(p))
        self.transfer = None

    def _step(self, differences: Values, moving: Sequence[torch.Tensor]) -> None:
        """Take the outer step on the common parameters."""
        common, means = [self.common[p] for p in moving], [differences[p] for p in moving]
        if moving:
            self._outer.apply(common, means, [self.velocity_of(p) for p in moving])
