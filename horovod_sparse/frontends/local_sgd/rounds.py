"""Rounds of local steps: which fragment is exchanged when, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Limits
from horovod_sparse.engine.exchange import statistics_of
from horovod_sparse.frontends.local_sgd.fragment import Fragment
from horovod_sparse.frontends.local_sgd.outer import OuterSGD
from horovod_sparse.frontends.local_sgd.schedule import Schedule
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic


class Rounds:
    """Fragments of one model, and the order in which ranks exchange them.

    A fragment starts from common parameters theta. Its exchange ends with an outer step from theta, whose gradient is
    the mean over the ranks of C(theta - theta_local), where C is the compression with its memory.

    Args:
        names: Names of the optimizer's parameters.
        sparse: The configuration.
        transports: Transports of the ranks that take part, one for each fragment.
        outer: Settings of the outer step.
        schedule: Settings of the exchange.
        stall: Limits of the wait for a bucket.

    Attributes:
        compression: The configuration.
        fragments: The fragments.
        schedule: Settings of the exchange.
        epoch: The epoch that the script has set; None: none so far.
    """

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        sparse: Sparse,
        transports: Sequence[Transport],
        outer: OuterSGD,
        schedule: Schedule,
        stall: Limits,
    ) -> None:
        self.compression = sparse
        self.schedule = schedule
        self.fragments = [Fragment(sparse, transport, outer, schedule, stall) for transport in transports]
        self.epoch: int | None = None
        in_order = self._in_order(names)
        numbers = schedule.assign([p.numel() for p in in_order])
        for number, fragment in enumerate(self.fragments):
            own = {p: in_order[p] for p, one in zip(in_order, numbers, strict=True) if one == number}
            fragment.add(own)

    def _in_order(self, names: Mapping[torch.Tensor, str]) -> dict[torch.Tensor, str]:
        named = {name: p for p, name in names.items() if p.numel()}
        return {named[name]: name for name in self.fragments[0].exchange.order(list(named))}

    def admit(self, names: Mapping[torch.Tensor, str]) -> None:
        """Add parameters, the same on every rank, to the smallest fragment; a collective call."""
        self.settle()
        sizes = [sum(p.numel() for p in fragment.names) for fragment in self.fragments]
        self.fragments[sizes.index(min(sizes))].add(self._in_order(names))

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Names of all parameters."""
        return {p: name for fragment in self.fragments for p, name in fragment.names.items()}

    def parameters(self) -> Iterator[tuple[torch.Tensor, str, Fragment]]:
        """Yield each parameter with its name and its fragment."""
        for fragment in self.fragments:
            for p, name in fragment.names.items():
                yield p, name, fragment

    def before_step(self) -> None:
        """Save the common parameters; to be called before each step."""
        for fragment in self.fragments:
            fragment.before_step()

    def advance(self, step: int, local_steps: int) -> int:
        """Apply and begin the exchanges that are due after a step.

        Args:
            step: Number of steps of this rank in the round, with this one.
            local_steps: Number of steps of a round.

        Returns:
            Number of steps in the round from now on.
        """
        for fragment in self.fragments:
            if fragment.transfer is not None:
                fragment.transfer.left -= 1
        self._apply()
        begun = self.schedule.due(min(step, local_steps) - 1, local_steps)
        for number in range(begun, self.schedule.due(step, local_steps)):
            if self.schedule.keeps_own:
                self._prepared(number).start()
                self._apply()
            else:
                self._prepared(number).unite(working=True, ending=False)
        return step if step < local_steps else 0

    def _apply(self) -> None:
        for fragment in self.fragments:
            if fragment.transfer is not None and fragment.transfer.left <= 0:
                fragment.finish()

    def end(self, begun: int, working: bool = True) -> None:
        """Exchange all fragments; parameters then have the same bits on every rank. A collective call.

        Args:
            begun: Number of fragments whose exchange has begun in this round.
            working: Whether this rank will take further steps.
        """
        for number in range(begun, begun + len(self.fragments)):
            # A rank that takes no further steps is in hvd.join(), and has not called synchronize().
            self._prepared(number).unite(working, ending=working)

    def _prepared(self, number: int) -> Fragment:
        """Return the fragment of an exchange, which counts on from one round to the next, with the epoch set."""
        fragment = self.fragments[number % len(self.fragments)]
        fragment.exchange.epoch = self.epoch
        return fragment

    def join(self, begun: int) -> Callable[[], None]:
        """Participate in the other ranks' rounds until no rank takes further steps; for ``hvd.join()``.

        Args:
            begun: Number of fragments whose exchange has begun in this round.

        Returns:
            A function that waits for the end.
        """

        def take_part() -> None:
            try:
                self._follow(begun)
            except BaseException as error:
                process.abort(f"failed in the other ranks' rounds while it was in hvd.join(): {error!r}")

        thread = process.background("horovod_sparse_join")
        future = thread.submit(take_part)

        def wait() -> None:
            future.result()
            thread.close()

        return wait

    def _follow(self, number: int) -> None:
        """Take part in the other ranks' exchanges; once no rank works, all of them end the round."""
        ending, works = 0, True
        while works:
            outcome = self._prepared(number).unite(working=False, ending=False)
            works, number, ending = outcome.works, number + 1, ending + outcome.ending
            if ending == len(self.fragments):  # the other ranks have ended their round
                number = ending = 0
        self.end(number, working=False)

    def settle(self) -> None:
        """Wait for exchanges in flight, and take their outer steps; this rank's parameters do not change.

        Before a collective call, all ranks must have taken the same steps.
        """
        for fragment in self.fragments:
            fragment.settle()

    def reset(self) -> None:
        """Forget the residuals; a collective call."""
        self.settle()
        for fragment in self.fragments:
            fragment.exchange.reset()

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received so far."""
        total = Traffic()
        for fragment in self.fragments:
            total.add(fragment.exchange.traffic)
        return total

    def statistics(self, norms: bool) -> dict[str, float]:
        """Return statistics of the buckets of all fragments."""
        self.settle()
        return statistics_of([fragment.exchange for fragment in self.fragments], norms)
