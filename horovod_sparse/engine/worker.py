"""Worker thread that exchanges the buckets of one model, in an order that is the same on every rank."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from horovod_sparse import metrics
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Position, Progress
from horovod_sparse.engine.bucket import Bucket, StepGradients
from horovod_sparse.engine.clipping import clip
from horovod_sparse.engine.device import Device
from horovod_sparse.engine.pipeline.base import NoBackwardError
from horovod_sparse.engine.reading import Reading
from horovod_sparse.kernels import copy_to_host
from horovod_sparse.metrics.counts import statistics
from horovod_sparse.transport.traffic import Traffic
from horovod_sparse.transport.waiting import keep_alive


class _Job(NamedTuple):
    """Exchange of one bucket in one step."""

    bucket: Bucket
    collected: StepGradients
    reading: Reading


class Worker:
    """Exchanges buckets on one thread, so that the exchange overlaps the backward pass.

    Hooks fire in any order, which may differ between ranks. Buckets start strictly in the order of their numbers, so
    that the collectives of all ranks match. Thread and transport are private.

    Args:
        read: Returns the conditions of the step for the index of a param group; called in program order.
        undoable: Whether the buckets can undo a step.
        factor_for: Clipping: returns a factor on all gradients of this rank for their total norm without the loss
            scale. No bucket starts before all are complete then. None: gradients are not clipped.

    Attributes:
        buckets: All buckets in the order of exchange; empty if there is one rank.
        confirmed: Whether a step counts only after a call of ``confirm``. Until then it can be resumed or dropped.
        failed: The error that ended the step in progress; None: none so far.
        unapplied: Buckets that have been exchanged, and whose result no optimizer has applied.
        unconfirmed: Whether no optimizer has taken a step since the last exchange; the same on ranks that have
            different shards.
    """

    def __init__(
        self,
        read: Callable[[int], Reading],
        undoable: bool = False,
        factor_for: Callable[[float], float] | None = None,
    ) -> None:
        self.buckets: list[Bucket] = []
        self.failed: BaseException | None = None
        self.confirmed = self.unconfirmed = False
        self._read = read
        self._undoable = undoable
        self._factor_for = factor_for
        self._devices: set[Device] = set()
        self._bucket_of: dict[str, Bucket] = {}
        self._lock = threading.Lock()  # autograd runs one thread per device, and each may fire hooks
        self._thread = process.background("horovod_sparse")
        self.unapplied: list[Bucket] = []  # whose result no optimizer has applied
        self._begun: list[Bucket] = []  # whose exchange has begun in this step
        self._first = 0  # number of the first of those that were started last
        self._next = 0  # number of the bucket that starts next
        self._step = 0
        self._complete = 0  # ns; time of the last gradient of the step in progress
        self._exposed = 0.0  # seconds of the last step's exchange after its last gradient was available; 0 on a GPU
        self._running: Bucket | None = None
        self._joined = False

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Append buckets; they take part in the step in progress."""
        self.buckets += buckets
        self._devices |= {bucket.device for bucket in buckets}
        self._bucket_of |= {key: bucket for bucket in buckets for key in bucket.layout.keys}

    def bucket_of(self, key: str | None) -> Bucket | None:
        """Return the bucket that holds the gradient of this key; None if there is none."""
        return None if key is None else self._bucket_of.get(key)

    def put(self, bucket: Bucket, key: str, gradient: torch.Tensor, hold: bool = False) -> None:
        """Take a gradient, and start the buckets that are complete and next in order.

        Args:
            bucket: The bucket that holds the key.
            key: Key of the gradient.
            gradient: The gradient, dense; overwritten with the result.
            hold: Keep the gradient's residual out of this step: it neither grows nor is sent.
        """
        self._require_complete()
        with self._lock:
            self._drop()
            bucket.put(key, gradient, hold)
            self._start()

    def leave_out(self, bucket: Bucket, key: str) -> None:
        """Exchange the bucket without a gradient that is exchanged elsewhere in this step."""
        self._require_complete()
        with self._lock:
            self._drop()
            bucket.collected.waiting.discard(key)
            self._start()

    def _start(self) -> None:
        buckets = self.buckets[self._next :]
        if self._factor_for is not None and buckets:
            if any(bucket.collected.waiting for bucket in buckets):
                return
            for bucket in buckets:
                bucket.mark_ready()
            steps = [(bucket, bucket.collected) for bucket in buckets]
            reading = self._read(buckets[0].layout.group)
            self._thread.submit(partial(self._clip, steps, reading, self._factor_for))
        while self._next < len(self.buckets):
            together = self._together(self._next)
            if any(bucket.collected.waiting for bucket in together):
                break
            for bucket in together:
                bucket.mark_ready()
            readings = [self._read(bucket.layout.group)._replace(exposed=self._exposed) for bucket in together]
            jobs = [_Job(one, one.collected, reading) for one, reading in zip(together, readings, strict=True)]
            self._thread.submit(partial(self._run, jobs))
            self._next += len(together)
        if buckets and self._next == len(self.buckets):
            self._complete = time.perf_counter_ns()

    def _together(self, first: int) -> list[Bucket]:
        """Return the buckets that share messages: those of small parameters, and the next one."""
        large = (number for number in range(first, len(self.buckets)) if not self.buckets[number].layout.small)
        return self.buckets[first : next(large, first) + 1]

    def _run(self, jobs: Sequence[_Job]) -> None:
        # If only this rank failed, the others are still in that bucket: going on would wait forever.
        if self.failed is None:
            self._first = jobs[0].bucket.layout.number
            try:
                self._exchange(jobs)
            except BaseException as error:
                self.failed = error
        for job in jobs:
            job.collected.done.set_result(None)

    def _exchange(self, jobs: Sequence[_Job]) -> None:
        """Exchange buckets with shared messages: start all, run the last, finish the rest."""
        ends: list[Callable[[], None]] = []
        last = jobs[-1].collected
        last.began = time.perf_counter_ns()  # start time of all these buckets
        try:
            with process.communicating():
                for job in jobs:
                    self._running = job.bucket
                    self._begun.append(job.bucket)
                    if job is jobs[-1]:
                        job.bucket.exchange(job.collected, job.reading.wait)
                    else:
                        ends.append(job.bucket.start_exchange(job.collected, job.reading.wait))
                for job, end in zip(jobs[:-1], ends, strict=True):
                    self._running = job.bucket
                    end()
        except NoBackwardError:  # on all ranks
            for end in ends:
                with suppress(NoBackwardError):
                    end()
            raise
        except BaseException:
            keep_alive(ends)  # messages are still in flight
            raise
        finally:
            last.ended = time.perf_counter_ns()
            self._running = None

    def _clip(
        self,
        steps: Sequence[tuple[Bucket, StepGradients]],
        reading: Reading,
        factor_for: Callable[[float], float],
    ) -> None:
        try:
            with ExitStack() as streams:
                gradients: list[torch.Tensor] = []
                for bucket, collected in steps:
                    streams.enter_context(bucket.work(collected))
                    gradients += [one for key, one in collected.gradients.items() if key not in collected.held]
                clip(gradients, factor_for, reading.wait().loss_scale)
        except BaseException as error:
            self.failed = error

    @property
    def complete(self) -> bool:
        """True from the exchange of the last gradient until the step is finished."""
        return bool(self.buckets) and self._next == len(self.buckets)

    @property
    def collecting(self) -> bool:
        """True while a step has gradients and is not finished."""
        return any(bucket.collected.gradients for bucket in self.buckets)

    def collect(self) -> None:
        """Wait until all gradients have been exchanged; all buckets must be complete.

        Raises:
            BaseException: The error that ended the step.
        """
        assert self._next == len(self.buckets), "a result was waited for before its bucket was complete"
        self._wait()
        if self.failed is not None:
            raise self.failed
        self._follow()

    def _follow(self) -> None:
        """Order the caller's stream after all work on gradients: it then may read the results, and free gradients."""
        for device in self._devices:
            device.follow()

    def __del__(self) -> None:
        """Free gradients of a step that was left unfinished only after the work on them, like ``finish``."""
        if self.collecting:
            self._follow()

    def _wait(self) -> None:
        for bucket in self.buckets[: self._next]:
            if not bucket.collected.done.done():
                with metrics.span("wait", bucket=bucket.layout.number):
                    bucket.collected.done.result()

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Finish the step after the block, which waits for its results.

        An exception raised by a signal handler may leave the block while buckets are in exchange; it is not delayed
        until they are done. The other ranks may then apply a step that this rank does not, so this worker refuses
        further gradients and refuses to return its state.
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
                self.finish(failed=True)
            raise
        self.finish()

    @property
    def interrupted(self) -> bool:
        """True after an exception has interrupted a step during its exchange."""
        return bool(self._thread.abandoned)

    def _require_complete(self) -> None:
        if self._thread.abandoned:
            raise RuntimeError(
                f"rank {process.job.rank}: {self._thread.abandoned}: other ranks may have applied that step, which "
                "this rank has not: start again from the last checkpoint"
            )

    def finish(self, failed: bool = False) -> None:
        """Wait for everything that was started, and prepare the next step.

        Args:
            failed: Whether the front end raises an error. If the step cannot be undone, it then counts as applied.
        """
        self._wait()
        self._follow()  # also after an error, and if the front end did not wait for the results itself
        failed |= self.failed is not None
        self.unconfirmed = self.confirmed
        if self.confirmed and not (failed and not self._undoable):
            self.unapplied = [bucket for bucket in self._begun if self._undoable or bucket.changed]
        self.failed, self._begun, self._next, self._first = None, [], 0, 0
        self._step += 1
        exposed = sum([bucket.begin(self._complete) for bucket in self.buckets])
        # On a GPU, gradients are available later than the host's clock has it, and waits seem longer than they are.
        on_host = all(bucket.layout.torch_device.type == "cpu" for bucket in self.buckets)
        self._exposed = exposed / 1e9 if on_host else 0.0

    def join(self, after_step: Callable[[], None], ended: Callable[[BaseException | None], None]) -> Callable[[], None]:
        """Participate with zero gradients until no rank has a backward pass; for ``hvd.join()``.

        Args:
            after_step: Called after each step, on the worker thread.
            ended: Called at the end, on that thread, with the error if there was one.

        Returns:
            A function that waits for the end.
        """
        self._require_complete()
        self._joined = True
        steps = {bucket: replace(self._read(bucket.layout.group).wait(), idle=True) for bucket in self.buckets}

        def take_part() -> None:
            taken = 0
            try:
                while True:
                    first = 0
                    while together := self._together(first):
                        self._exchange([_Job(one, StepGradients(), Reading(steps[one])) for one in together])
                        first += len(together)
                    after_step()
                    self._begun = []
                    self._step += 1
                    taken += 1
            except NoBackwardError:
                # The optimizer of this rank has not followed.
                for bucket in self.buckets if taken else ():
                    bucket.replace_momentum()
                ended(None)
            except BaseException as error:
                ended(error)
            finally:
                self._joined = False

        return self._thread.submit(take_part).result

    @property
    def pending(self) -> bool:
        """True from an exchange until an optimizer has applied all of its results."""
        return bool(self.unapplied or self._begun)

    def confirm(self, applied: Callable[[int], bool] | None = None) -> None:
        """Note that a step that was exchanged has been applied.

        Args:
            applied: Whether the parameters of a group, by its number, were part of the optimizer's step; None: all.
        """
        self.unconfirmed = False
        others = [bucket for bucket in self.buckets if applied is not None and not applied(bucket.layout.group)]
        for bucket in self.buckets:
            bucket.collected.resumes &= bucket in others
        left = [bucket for bucket in self.unapplied or self._begun if bucket in others]
        self.unapplied, self._begun = (left, []) if self.unapplied else ([], left)

    def resume(self, kept: Sequence[Bucket]) -> None:
        """Begin a backward pass after a step that was exchanged but not applied.

        Args:
            kept: Buckets whose result is still held by the gradients, to which this pass adds. The other results have
                been cleared: they are dropped.

        Raises:
            RuntimeError: Results have been cleared, and cannot be undone.
        """
        with self._lock:
            self.unapplied = [bucket for bucket in self.unapplied if bucket not in kept]
            self._drop()
            for bucket in kept:
                bucket.collected.resumes = True

    def settle(self) -> None:
        """Undo a step that was exchanged but not applied, if it can be; to be called between steps."""
        self._require_complete()
        with self._lock:
            if self._undoable:
                self._drop()

    def _drop(self) -> None:
        """Undo the exchange of results that are not applied."""
        if not self.unapplied:
            return
        if not self._undoable:
            raise RuntimeError(
                f"rank {process.job.rank}: gradients were exchanged by backward() and cleared without a step of the "
                "optimizer, but their exchange has changed the residuals: compute gradients that are not applied "
                "without an exchange (inside model.no_sync(), or with set_requires_gradient_sync(False)), pass the "
                "grad_scaler if it skips steps, or pass undoable=True, which keeps the state before each step"
            )
        for bucket in reversed(self.unapplied):  # the first one keeps the shared state from before the step
            bucket.undo()
        self.unapplied = []

    def reset(self) -> None:
        """Return to the state of a new worker; a collective call between steps."""
        self._require_complete()
        for bucket in self.buckets:
            bucket.reset()
        self.unapplied = []

    def progress(self) -> Progress:
        """Return the progress of the exchange, for other threads."""
        running = self._running
        if running is not None:
            return Progress(self._step, running.layout.number, running.pipeline.stage)
        done = 0 < len(self.buckets) == self._next
        return Progress(self._step + done, 0 if done else self._next)

    def started(self) -> Position:
        """Return step and number of the first bucket that this rank will not exchange if it leaves now."""
        if self._joined:
            return sys.maxsize, 0
        if self.failed is not None:
            return self._step, self._first
        return self._step, self._next

    def names(self, bucket: int) -> list[str]:
        """Return the keys of the gradients in a bucket, for reports."""
        return self.buckets[bucket].layout.keys

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received so far, over all buckets."""
        total = Traffic()
        for bucket in self.buckets:
            total.add(bucket.pipeline.traffic)
        return total

    def statistics(self, norms: bool) -> dict[str, float]:
        """Return statistics of each bucket and of all together since the last call; to be called between steps.

        Args:
            norms: Take norms in the next step, for the call after it.
        """
        return statistics({bucket.layout.number: bucket.pipeline.statistics(norms) for bucket in self.buckets})

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Return the states of all buckets, copied to the host by ``copy``; to be called after ``settle``."""
        return {"buckets": [bucket.state_dict(copy) for bucket in self.buckets]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on the same rank of the same world size.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration, or is damaged. All buckets
                keep their state.
        """
        self._require_layout(state)
        before: list[tuple[Bucket, dict[str, Any]]] = []
        try:
            for bucket, saved in zip(self.buckets, state["buckets"], strict=True):
                before.append((bucket, bucket.state_dict(copy_to_host)))
                bucket.load_state_dict(saved)
        except ValueError:
            for bucket, own in before[:-1]:  # the last one refused its state and is unchanged
                bucket.load_state_dict(own)
            raise

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size; this worker itself is unchanged.

        Args:
            states: States that this rank takes over, from ``state_dict``; may be empty.
            leader: The state of the old rank 0, in which memories may be left out.

        Returns:
            A state for ``load_state_dict``, and notes on what was not carried over.

        Raises:
            ValueError: Buckets or memories differ from those of this worker.
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
        mine = [bucket.layout.keys for bucket in self.buckets]
        theirs = [bucket["parameters"] for bucket in state["buckets"]]
        if mine != theirs:
            raise ValueError(
                f"rank {process.job.rank}: the state holds buckets of {theirs}, but here they are {mine}: load it "
                "with the model, bucket_bytes, dense_below and groups it was saved with, and with the same parameters "
                "frozen at first"
            )
