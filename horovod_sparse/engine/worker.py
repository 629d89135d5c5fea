"""Runs the buckets of one model, each as soon as its gradients are there, in one order on every rank."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from horovod_sparse import metrics
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Position, Progress
from horovod_sparse.engine.bucket import Bucket, Facts, StepGradients
from horovod_sparse.engine.pipeline.base import NoBackwardError
from horovod_sparse.kernels import copy_to_host
from horovod_sparse.metrics.counts import statistics
from horovod_sparse.rules import Step
from horovod_sparse.transport.traffic import Traffic


class _Job(NamedTuple):
    """A bucket's part in a step."""

    bucket: Bucket
    collected: StepGradients
    conditions: Callable[[], Step]


class Worker:
    """Exchanges buckets on one thread, so that the exchange overlaps the backward pass.

    Hooks fire in any order and not on every rank alike; buckets start strictly in the order of their numbers,
    so that the ranks' collectives always meet. One thread and one communicator belong to one worker alone.

    Args:
        conditions: Gives, for an index of a param group, a function that gives the conditions of the step in progress.
            The first is called in the order of the program, the second on the worker's thread, where it may wait for
            the device.
        undoable: Whether a step counts only when ``confirm`` was called after it. The buckets must be undoable, too.
        clip: Gives a factor on all gradients of this rank, for the norm of all of them without the loss scale. It is
            known when they are there: then no bucket starts before all are complete.

    Attributes:
        buckets: All buckets, in the order of exchange; none where there is one rank.
        failed: The error that ended the step in progress; None: there was none so far.
    """

    def __init__(
        self,
        conditions: Callable[[int], Callable[[], Step]],
        undoable: bool = False,
        clip: Callable[[float], float] | None = None,
    ) -> None:
        self.buckets: list[Bucket] = []
        self.failed: BaseException | None = None
        self._conditions = conditions
        self._undoable = undoable
        self._clip = clip
        self._followed: list[bool] = []  # which buckets take the facts of the next one along
        self._bucket_of: dict[torch.Tensor, Bucket] = {}
        self._lock = threading.Lock()  # autograd runs one thread a device, and each may fire hooks
        self._thread = process.background("horovod_sparse")
        self._exchanged: list[Bucket] = []  # in a step that was not applied so far
        self._begun: list[Bucket] = []  # whose exchange has begun in this step
        self._next = 0  # number of the bucket that starts next
        self._step = 0
        self._complete = 0  # ns; when the last gradient of the step in progress was handed in
        self._running: Bucket | None = None
        self._standing_in = False

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Appends buckets; they take part in the step in progress.

        One of small parameters, which needs no agreement, takes that of the bucket behind it along: a message less.
        """
        dense = [bucket.layout.dense for bucket in buckets]
        self._followed += [one and not other for one, other in itertools.pairwise([*dense, True])]
        self.buckets += buckets
        self._bucket_of |= {slot.parameter: bucket for bucket in buckets for slot in bucket.layout.slots}

    def bucket_of(self, parameter: torch.Tensor) -> Bucket | None:
        """The bucket in which a parameter has its place; None: it has none."""
        return self._bucket_of.get(parameter)

    def put(self, bucket: Bucket, parameter: torch.Tensor, gradient: torch.Tensor, hold: bool = False) -> None:
        """Hands in a gradient; starts the buckets that are complete and whose turn it is.

        Args:
            bucket: That of the parameter.
            parameter: A parameter of this worker.
            gradient: Its gradient, dense; overwritten with the result.
            hold: Keep the parameter's residual out of this step: it neither grows nor travels.
        """
        self._require_whole()
        with self._lock:
            self._undo()
            bucket.put(parameter, gradient, hold)
            self._start()

    def leave_out(self, bucket: Bucket, parameter: torch.Tensor) -> None:
        """Lets the bucket go without a parameter whose gradient takes another way in this step."""
        self._require_whole()
        with self._lock:
            self._undo()
            bucket.collected.waiting.discard(parameter)
            self._start()

    def _start(self) -> None:
        buckets = self.buckets[self._next :]
        if self._clip is not None and buckets:
            if any(bucket.collected.waiting for bucket in buckets):
                return
            steps = [(bucket, bucket.collected) for bucket in buckets]
            conditions = self._conditions(buckets[0].layout.group)
            self._thread.submit(partial(self._clip_all, steps, conditions, self._clip))
        while self._next < len(self.buckets):
            together = self._together(self._next)
            if any(bucket.collected.waiting for bucket in together):
                break
            # Read here, in the order of the program: a schedule may change it while the worker is still busy.
            jobs = [_Job(bucket, bucket.collected, self._conditions(bucket.layout.group)) for bucket in together]
            self._thread.submit(partial(self._run, jobs))
            self._next += len(together)
        if buckets and self._next == len(self.buckets):
            self._complete = time.perf_counter_ns()

    def _together(self, first: int) -> list[Bucket]:
        """A bucket, and the one whose facts it takes along."""
        return self.buckets[first : first + 1 + self._followed[first]]

    def _run(self, jobs: Sequence[_Job]) -> None:
        exchanges = self._exchanges(jobs)
        for job in jobs:
            # Where only this rank failed, the others are still in that bucket: to go on would be to wait for ever.
            if self.failed is None:
                self._begun.append(job.bucket)
                job.collected.began = time.perf_counter_ns()
                try:
                    next(exchanges)
                except BaseException as error:
                    self.failed = error
                job.collected.ended = time.perf_counter_ns()
            job.collected.done.set_result(None)

    def _clip_all(
        self,
        steps: Sequence[tuple[Bucket, StepGradients]],
        conditions: Callable[[], Step],
        clip: Callable[[float], float],
    ) -> None:
        try:
            squares = sum(bucket.square_norm(collected) for bucket, collected in steps)
            factor = clip(math.sqrt(squares) / conditions().loss_scale)
            if factor != 1:
                for bucket, collected in steps:
                    bucket.scale(collected, factor)
        except BaseException as error:
            self.failed = error

    def _exchanges(self, jobs: Sequence[_Job]) -> Iterator[None]:
        """Exchanges buckets that go together, one at each step."""
        agreed: Facts = None
        for job, behind in itertools.pairwise([*jobs, None]):
            assert job is not None
            facts: dict[str, Facts] = {} if agreed is None else {"agreed": agreed}
            self._running = job.bucket
            try:
                with process.communicating():
                    if behind is not None:
                        facts["ahead"] = behind.bucket.facts(behind.collected, behind.conditions)
                    agreed = job.bucket.exchange(job.collected, job.conditions, **facts)
            finally:
                self._running = None
            yield

    @property
    def collecting(self) -> bool:
        """Tells if gradients of a step were handed in that is not finished yet."""
        return any(bucket.collected.gradients for bucket in self.buckets)

    def collect(self) -> None:
        """Waits until everything that was handed in has been exchanged; all buckets must be complete.

        Raises:
            BaseException: The error that ended the step.
        """
        assert self._next == len(self.buckets), "a result was waited for before its bucket was complete"
        self._wait()
        if self.failed is not None:
            raise self.failed
        for bucket in self.buckets:
            bucket.follow(bucket.collected)

    def _wait(self) -> None:
        for bucket in self.buckets[: self._next]:
            if not bucket.collected.done.done():
                with metrics.span("wait", bucket=bucket.layout.number):
                    bucket.collected.done.result()

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Finish the step after the block, which waits for its results.

        An exception raised by a signal handler may leave the block while buckets are in exchange. It is not held back
        until they are done. The other ranks may apply a step then that this rank does not, so that this worker refuses
        further gradients, and to be asked for its state.
        """
        try:
            yield
        except BaseException as error:
            running = [bucket for bucket in self.buckets[: self._next] if not bucket.collected.done.done()]
            if running:
                self._thread.abandoned = (
                    f"{type(error).__name__} interrupted step() while bucket {running[0].layout.number} was in exchange"
                )
            else:
                self.finish()
            raise
        self.finish()

    @property
    def interrupted(self) -> bool:
        """Tell whether an exception has left a step while its buckets were in exchange."""
        return bool(self._thread.abandoned)

    def _require_whole(self) -> None:
        if self._thread.abandoned:
            raise RuntimeError(
                f"rank {process.job.rank}: {self._thread.abandoned}: other ranks may have applied that step, which "
                "this rank has not: start again from the last checkpoint"
            )

    def finish(self) -> None:
        """Wait for everything that was started, and make ready for the next step."""
        self._wait()
        if self._undoable:
            self._exchanged = self._begun
        self.failed, self._begun, self._next = None, [], 0
        self._step += 1
        for bucket in self.buckets:
            bucket.begin(self._complete)

    def stand_in(self, after_step: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        """Takes part, from now on, with nothing to give, until no rank gives anything; for ``hvd.join()``.

        Args:
            after_step: Called after each step, on the worker's thread.
            ended: Called when it is over, on that thread, with the error if there was one.
        """
        self._require_whole()
        self._standing_in = True
        steps = {bucket: replace(self._conditions(bucket.layout.group)(), idle=True) for bucket in self.buckets}
        firsts = [number for number in range(len(self.buckets)) if not (number and self._followed[number - 1])]

        def take_part() -> None:
            try:
                while True:
                    for first in firsts:
                        jobs = [
                            _Job(one, StepGradients(), partial(replace, steps[one])) for one in self._together(first)
                        ]
                        for _ in self._exchanges(jobs):
                            pass
                    after_step()
                    self._step += 1
            except NoBackwardError:
                ended(None)
            except BaseException as error:
                ended(error)
            finally:
                self._standing_in = False

        self._thread.submit(take_part)

    def confirm(self) -> None:
        """The step that was exchanged has been applied."""
        self._exchanged, self._begun = [], []

    def settle(self) -> None:
        """Undoes a step that was exchanged, but not applied; to be called between steps."""
        self._require_whole()
        with self._lock:
            self._undo()

    def _undo(self) -> None:
        for bucket in reversed(self._exchanged):  # the first one knows what all share as it was before the step
            bucket.undo()
        self._exchanged = []

    def progress(self) -> Progress:
        """Progress of the exchange; for other threads."""
        running = self._running
        if running is not None:
            return Progress(self._step, running.layout.number, running.pipeline.stage)
        done = 0 < len(self.buckets) == self._next
        return Progress(self._step + done, 0 if done else self._next)

    def started(self) -> Position:
        """Return step and number of the first bucket that this rank will not exchange if it begins to leave now."""
        if self._standing_in:
            return sys.maxsize, 0
        if self.failed is not None:
            return self._step, self._begun[-1].layout.number if self._begun else 0
        return self._step, self._next

    @property
    def traffic(self) -> Traffic:
        """Payload this rank has sent and received so far, over all buckets."""
        total = Traffic()
        for bucket in self.buckets:
            total.add(bucket.pipeline.traffic)
        return total

    def statistics(self, norms: bool) -> dict[str, float]:
        """Numbers of each bucket and of all together since the last call; to be called between steps.

        Args:
            norms: Whether those of the next step are taken, for the call after it.
        """
        return statistics({bucket.layout.number: bucket.pipeline.statistics(norms) for bucket in self.buckets})

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """The states of all buckets, copied to the host by ``copy``; to be called between steps, after ``settle``."""
        return {"buckets": [bucket.state_dict(copy) for bucket in self.buckets]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state given by ``state_dict`` on the same rank of as many ranks.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration, or is damaged. All buckets
                keep the state that they had.
        """
        self._require_layout(state)
        before: list[tuple[Bucket, dict[str, Any]]] = []
        try:
            for bucket, saved in zip(self.buckets, state["buckets"], strict=True):
                before.append((bucket, bucket.state_dict(copy_to_host)))
                bucket.load_state_dict(saved)
        except ValueError:
            for bucket, own in before[:-1]:  # the last one has refused its state, and keeps its own
                bucket.load_state_dict(own)
            raise

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The state that goes on from those of another number of ranks; this worker itself stays as it is.

        Args:
            states: Those that this rank takes over, as ``state_dict`` gave them; there may be none.
            leader: The old rank 0's, in which memories may be left out.

        Returns:
            A state for ``load_state_dict``, and what has not been carried over.

        Raises:
            ValueError: Buckets or memories are others than those of this worker.
        """
        if self.buckets and not leader["buckets"]:
            return self.state_dict(), ["residuals start empty: it was saved by one rank, which exchanges nothing"]
        if leader["buckets"] and not self.buckets:
            return self.state_dict(), ["residuals are dropped: one rank alone exchanges nothing"]
        self._require_layout(leader)
        merged, notes = [], []
        for number, bucket in enumerate(self.buckets):
            state, more = bucket.merge([one["buckets"][number] for one in states], leader["buckets"][number])
            merged.append(state)
            notes += more
        return {"buckets": merged}, list(dict.fromkeys(notes))

    def _require_layout(self, state: Mapping[str, Any]) -> None:
        mine = [bucket.layout.names for bucket in self.buckets]
        theirs = [bucket["parameters"] for bucket in state["buckets"]]
        if mine != theirs:
            raise ValueError(
                f"the state holds buckets of {theirs}, but here they are {mine}: load it with the model, "
                "bucket_bytes, dense_below and groups it was saved with, and with the same parameters frozen at first"
            )
