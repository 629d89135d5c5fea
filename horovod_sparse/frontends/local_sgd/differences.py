"""Exchange of how far the parameters of a fragment have moved, and what its ranks agree on first."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Limits
from horovod_sparse.engine.exchange import Exchange
from horovod_sparse.engine.layout import Member
from horovod_sparse.frontends.shards import shard_of
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.base import Transport

CALL = "synchronize()"  # for reports of stalls
Values = dict[torch.Tensor, torch.Tensor]  # of this rank's shard, by parameter


class Outcome(NamedTuple):
    """Facts about all ranks that an exchange begins with.

    Attributes:
        works: Whether any rank will take further steps.
        ending: Whether ranks have called ``synchronize()``.
        moving: Parameters that any rank has given; empty if no rank has taken a step.
    """

    works: bool
    ending: bool
    moving: list[torch.Tensor]


class Differences(Exchange):
    """Exchange of the differences between common parameters and each rank's own.

    Differences of parameters are updates, so their residuals do not follow the learning rate.

    Args:
        sparse: The configuration.
        transport: Transport of the ranks that take part; used by this exchange only.
        stall: Limits of the wait for a bucket.
        needs_synchronize: Whether the ranks' parameters are equal only after ``synchronize()``, which all of them must
            then call after the same step.

    Attributes:
        names: Names of the parameters, in the same order on every rank.
        overlaps: Whether the program goes on during the exchange; for the statistics, what it waits for is exposed.
        waits_since: When the program began to wait for it, in ns of ``time.perf_counter_ns``; 0: it does not.
    """

    def __init__(self, sparse: Sparse, transport: Transport, stall: Limits, needs_synchronize: bool) -> None:
        me = weakref.proxy(self)
        super().__init__(sparse, transport, 1 / transport.size, stall, admit=lambda keys: me._admit_named(keys))
        self.names: dict[torch.Tensor, str] = {}
        self._compared: set[torch.Tensor] = set()
        self.overlaps = False
        self.waits_since = 0
        self._needs_synchronize = needs_synchronize
        self._failure = ""

    def create_buckets(self, parameters: Iterable[torch.Tensor]) -> None:
        """Create buckets for parameters; a collective call."""
        least = self.compression.dense_below
        members = [Member.of(self.names[p], p, -1, least=least, shard=shard_of(p)) for p in parameters]
        if members:
            self.add(members)

    def require_intact(self) -> None:
        """Raise RuntimeError if an exchange has failed on this rank, which others may have completed."""
        if self._failure:
            raise RuntimeError(
                f"rank {process.job.rank}: an exchange of local steps has failed ({self._failure}), and other ranks "
                "may have completed it: end the program, and start again from the last checkpoint"
            )

    def _admit_named(self, keys: Sequence[str]) -> None:
        """Create a bucket for parameters that were trained before a checkpoint; a collective call."""
        named = {name: p for p, name in self.names.items()}
        # Buckets are saved in the order of exchange, which reverses that of the parameters.
        self.create_buckets(named[key] for key in reversed(keys) if key in named)

    def outcome(self, working: bool, ending: bool, stepped: bool, given: Collection[torch.Tensor]) -> Outcome:
        """Return what holds for all ranks; a collective call.

        Args:
            working: Whether this rank will take further steps.
            ending: Whether it has called ``synchronize()``.
            stepped: Whether it has taken a step.
            given: Parameters that it may train, or has moved.

        Raises:
            RuntimeError: Only some of the ranks have called ``synchronize()``, though they must do so together; or an
                earlier exchange has failed.
        """
        self.require_intact()
        flags = np.array([working, ending, stepped, *(p in given for p in self.names)], np.int32)
        with process.communicating(CALL, self.transport):
            works, ends, steps, *givers = self.transport.allreduce(flags).tolist()
        if self._needs_synchronize and ends not in (0, works):
            raise RuntimeError(
                f"rank {process.job.rank}: {ends} of {works} ranks have called synchronize(), and the others have not: "
                "with fragments, a delay or alpha, call it on all ranks after the same number of steps"
            )
        moving = [p for p, count in zip(self.names, givers, strict=True) if count and steps]
        return Outcome(works > 0, ends > 0, moving)

    def compare(self, moving: Iterable[torch.Tensor], digest_at_start: Callable[[torch.Tensor], str]) -> None:
        """Check once that all ranks started with the same parameters; otherwise they would never become equal."""
        new = [p for p in moving if p not in self._compared]
        if not new:
            return
        start = tuple((self.names[p], digest_at_start(p)) for p in new)
        with process.communicating(CALL, self.transport):
            what = "start of the first round, which hvd.broadcast_parameters() makes common,"
            agree(self.transport, {what: start})
        self._compared.update(new)

    def mean(self, differences: Values, moving: Iterable[torch.Tensor], given: Collection[torch.Tensor]) -> None:
        """Replace differences by the mean over the ranks of what is sent; a collective call.

        Args:
            differences: What this rank gives; what only others give is added.
            moving: Parameters that any rank has given.
            given: Parameters that this rank has given; the residuals of others are kept until they are again.
        """
        try:
            self._mean(differences, moving, given)
        except BaseException as error:
            self._failure = repr(error)
            raise

    def _mean(self, differences: Values, moving: Iterable[torch.Tensor], given: Collection[torch.Tensor]) -> None:
        worker, named = self.worker, {name: p for p, name in self.names.items()}
        if self.ranks > 1:
            self.create_buckets(p for p in moving if self.names[p] not in worker)
        for p in [*moving, *map(named.__getitem__, worker.keys)]:
            if p not in differences:
                differences[p] = torch.zeros_like(shard_of(p.detach()))
        with worker.completing():
            for key in worker.keys:
                worker.put(key, differences[named[key]], hold=named[key] not in given)
            worker.wait_for_results()
            if self.overlaps:  # what was exchanged before the program waited counts as hidden
                worker.step.complete = self.waits_since or time.perf_counter_ns()


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of the bits of a tensor, and wait for them."""
    bits = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]
