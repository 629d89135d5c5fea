"""Worker thread that exchanges the buckets of one model, in an order that is the same on every rank."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from horovod_sparse import metrics
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Position, Progress
from horovod_sparse.engine.bucket import Bucket, StepGradients
from horovod_sparse.engine.clipping import clip
from horovod_sparse.engine.device import Device
from horovod_sparse.engine.pipeline.base import NoBackwardError
from horovod_sparse.engine.reading import Reading
from horovod_sparse.engine.step import ModelStep, State
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
        read: Returns the conditions of the step for the number of a param group; called in program order.
        undoable: Whether the buckets can undo a step.
        factor_for: Clipping: returns a factor on all gradients of this rank for their total norm without the loss
            scale. No bucket starts before all are complete then; buckets added after that are clipped by their own
            norm in this step. None: gradients are not clipped.

    Attributes:
        buckets: All buckets in the order of exchange; empty if there is one rank.
        step: The last step that has begun.
        without_exchange: How gradients are computed without an exchange, for messages.
        needs_confirmation: Whether a step counts only after ``confirm``. Until then it can be kept for more or dropped.
    """

    def __init__(
        self,
        read: Callable[[int], Reading],
        undoable: bool = False,
        factor_for: Callable[[float], float] | None = None,
    ) -> None:
        self.step = ModelStep(-1, State.APPLIED)
        self.buckets: list[Bucket] = []
        self.without_exchange = ""
        self.needs_confirmation = False
        self._read = read
        self._undoable = undoable
        self._factor_for = factor_for
        self._devices: set[Device] = set()
        self._gpu = -1  # the one that is current while buckets are exchanged; -1: unchanged
        self._bucket_of: dict[str, Bucket] = {}
        self._lock = threading.Lock()  # autograd runs one thread per device, and each may fire hooks
        self._thread = process.background("horovod_sparse")
        self._exposed = 0.0  # seconds of the last step's exchange after its last gradient was available; 0 on a GPU
        self._running: Bucket | None = None
        self._joined = False

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Append buckets; they take part in the step in progress."""
        self.buckets += buckets
        if self.step.state is State.EXCHANGING:
            self.step.enter(State.COLLECTING)
        self._devices |= {bucket.device for bucket in buckets}
        gpus = (one.layout.torch_device.index for one in buckets if one.layout.torch_device.type == "cuda")
        if self._gpu < 0:
            self._gpu = next(gpus, -1)
        self._bucket_of |= {key: bucket for bucket in buckets for key in bucket.layout.keys}

    @property
    def keys(self) -> list[str]:
        """Keys of all gradients, in the order of exchange."""
        return list(self._bucket_of)

    @property
    def missing(self) -> list[str]:
        """Keys of the gradients that are still missing in this step."""
        return [key for key, bucket in self._bucket_of.items() if key in bucket.collected.waiting]

    def __contains__(self, key: str) -> bool:
        """Return whether a bucket holds the gradient of this key."""
        return key in self._bucket_of

    def put(self, key: str, gradient: torch.Tensor, hold: bool = False) -> Future[None]:
        """Take a gradient, and start the buckets that are complete and next in order.

        Args:
            key: Key of the gradient.
            gradient: The gradient, dense; overwritten with the result.
            hold: Keep the gradient's residual out of this step: it neither grows nor is selected from.

        Returns:
            What is resolved at the end of the exchange, on success and on failure.
        """
        bucket = self._bucket_of[key]
        with self._lock:
            self._begin()
            bucket.put(key, gradient, hold)
            done = bucket.collected.done
            if not bucket.collected.waiting:  # its last gradient: no other one can start anything
                self._start()
        return done

    def leave_out(self, key: str) -> None:
        """Exchange the others without a gradient that is exchanged elsewhere in this step."""
        with self._lock:
            self._begin()
            self._bucket_of[key].collected.waiting.discard(key)
            self._start()

    def _begin(self) -> None:
        """Begin a step, unless one is in progress."""
        self._require_complete()
        if not self.step.active:
            self._drop()
            self.step = ModelStep(self.step.number + 1, awaits_optimizer=self.needs_confirmation)

    def _start(self) -> None:
        """Start the buckets that are complete and next in order."""
        step, buckets = self.step, self.buckets[self.step.started :]
        if self._factor_for is not None and buckets:
            if any(bucket.collected.waiting for bucket in buckets):
                return
            self._thread.submit(partial(self._clip, self._jobs(buckets), self._factor_for))
        while step.started < len(self.buckets):
            together = self._together(step.started)
            if any(bucket.collected.waiting for bucket in together):
                break
            self._thread.submit(partial(self._run, self._jobs(together)))
            step.started += len(together)
        if buckets and step.started == len(self.buckets):
            step.complete = time.perf_counter_ns()
            step.enter(State.EXCHANGING)

    def _jobs(self, buckets: Sequence[Bucket]) -> list[_Job]:
        for bucket in buckets:
            bucket.mark_ready()
        readings = [self._read(bucket.layout.group)._replace(exposed=self._exposed) for bucket in buckets]
        return [_Job(one, one.collected, reading) for one, reading in zip(buckets, readings, strict=True)]

    def _together(self, first: int) -> list[Bucket]:
        """Return the next buckets whose messages are in flight together: those of small parameters, and a large one.

        Without a large one left, each small one goes by itself.
        """
        large = (number for number in range(first, len(self.buckets)) if not self.buckets[number].layout.small)
        return self.buckets[first : next(large, first) + 1]

    def _run(self, jobs: Sequence[_Job]) -> None:
        # If only this rank failed, the others are still in that bucket: going on would wait forever.
        if self.step.error is None:
            self.step.last_begun = jobs[0].bucket.layout.number
            try:
                self._exchange(jobs)
            except BaseException as error:
                self.step.error = error
        for job in jobs:
            job.collected.done.set_result(None)

    def _exchange(self, jobs: Sequence[_Job]) -> None:
        """Exchange buckets whose messages are in flight together: start all but the last, run it, finish the others."""
        ends: list[Callable[[], None]] = []
        last = jobs[-1].collected
        last.began = time.perf_counter_ns()  # start time of all these buckets
        try:
            with process.communicating(), torch.cuda.device(self._gpu):
                for job in jobs:
                    self._running = job.bucket
                    self.step.unapplied.append(job.bucket)
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

    def _clip(self, jobs: Sequence[_Job], factor_for: Callable[[float], float]) -> None:
        try:
            with ExitStack() as streams:
                gradients: list[torch.Tensor] = []
                for bucket, collected, _ in jobs:
                    streams.enter_context(bucket.work(collected))
                    gradients += [one for key, one in collected.gradients.items() if key not in collected.held]
                clip(gradients, factor_for, jobs[0].reading.wait().loss_scale)
        except BaseException as error:
            self.step.error = error

    def wait_for_results(self) -> None:
        """Wait until all gradients have been exchanged; all buckets must be complete.

        Raises:
            BaseException: The error that ended the step.
        """
        assert self.step.state is not State.COLLECTING, "a result was waited for before its bucket was complete"
        self._wait()
        if self.step.error is not None:
            raise self.step.error
        self._follow()

    def _follow(self) -> None:
        """Order the caller's stream after all work on gradients: it then may read the results, and free gradients."""
        for device in self._devices:
            device.follow()

    def __del__(self) -> None:
        """Let the gradients of an unfinished step be freed only after the device's work on them."""
        if self.step.active:
            self._follow()

    def _wait(self) -> None:
        for bucket in self._unfinished_buckets():
            with metrics.span("wait", bucket=bucket.layout.number):
                bucket.collected.done.result()

    def _unfinished_buckets(self) -> list[Bucket]:
        """Return the buckets that were started, and whose exchange has not ended."""
        started = self.buckets[: self.step.started] if self.step.active else ()
        return [bucket for bucket in started if not bucket.collected.done.done()]

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
            unfinished = self._unfinished_buckets()
            if unfinished:
                number = unfinished[0].layout.number
                self._thread.abandoned = (
                    f"{type(error).__name__} interrupted step() while bucket {number} was in exchange"
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
        step = self.step
        if not step.active:
            return
        self._wait()
        self._follow()  # also after an error, and if the front end did not wait for the results itself
        failed, step.error = failed or step.error is not None, None  # its traceback holds gradients
        if not self.needs_confirmation or (failed and not self._undoable):
            step.unapplied = []
        step.unapplied = [bucket for bucket in step.unapplied if self._undoable or bucket.pipeline.changed]
        step.enter(State.REDUCED if step.unapplied else State.APPLIED)
        exposed = sum([bucket.end_step(step.complete) for bucket in self.buckets])
        # On a GPU, gradients are available later than the host's clock has it, and waits seem longer than they are.
        on_host = all(bucket.layout.torch_device.type == "cpu" for bucket in self.buckets)
        self._exposed = exposed / 1e9 if on_host else 0.0

    def wait_for_all_but_last(self) -> Sequence[Bucket]:
        """Wait until all buckets that were started are exchanged, but the last.

        It limits the gradients that are in memory at a time where buckets free theirs after the exchange.

        Returns:
            The buckets whose results the caller's stream may read; none after an error, which the end of the step
            raises.
        """
        buckets = self.buckets[: max(0, self.step.started - 1)] if self.step.active else []
        for bucket in buckets:
            bucket.collected.done.result()
        if self.step.error is not None:
            return []
        self._follow()
        return buckets

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
                    self.step, first = ModelStep(self.step.number + 1), 0
                    while together := self._together(first):
                        self._exchange([_Job(one, StepGradients(), Reading(steps[one])) for one in together])
                        first += len(together)
                    after_step()
                    self.step.enter(State.APPLIED)
                    taken += 1
            except NoBackwardError:
                # The optimizer of this rank has not followed.
                for bucket in self.buckets if taken else ():
                    bucket.replace_momentum()
                ended(None)
            except BaseException as error:
                ended(error)
            finally:
                self.step = ModelStep(self.step.number, State.APPLIED)
                self._joined = False

        return self._thread.submit(take_part).result

    def confirm(self, applied: Callable[[int], bool] = lambda _: True) -> None:
        """Note that a step whose exchange has begun has been applied; with DDP, ``finish`` may follow later.

        Args:
            applied: Whether the parameters of a group, by its number, were part of the optimizer's step.
        """
        step = self.step
        step.awaits_optimizer = False
        for bucket in self.buckets:
            bucket.collected.resumes &= not applied(bucket.layout.group)
        step.unapplied = [bucket for bucket in step.unapplied if not applied(bucket.layout.group)]
        if step.state is State.REDUCED and not step.unapplied:
            step.enter(State.APPLIED)

    @property
    def _unapplied(self) -> list[Bucket]:
        return self.step.unapplied if self.step.state is State.REDUCED else []

    def unapplied_numbers(self) -> list[int]:
        """Return the numbers of the buckets whose result no optimizer has applied, and no backward pass added to."""
        return [bucket.layout.number for bucket in self._unapplied if not bucket.collected.resumes]

    def resumed_numbers(self) -> list[int]:
        """Return the numbers of the buckets to whose unapplied result a backward pass has added."""
        return [bucket.layout.number for bucket in self._unapplied if bucket.collected.resumes]

    def resume(self, numbers: Container[int]) -> None:
        """Let the next exchange add to results that no optimizer has applied, by the numbers of their buckets."""
        with self._lock:
            for bucket in self.step.unapplied:
                bucket.collected.resumes |= bucket.layout.number in numbers

    def drop_unapplied(self, resumed: Container[int] = ()) -> None:
        """Undo the exchange of results that no optimizer has applied; RuntimeError if they cannot be undone.

        Args:
            resumed: Numbers of the buckets to drop although a backward pass has added to their results.
        """
        with self._lock:
            self._drop(resumed)

    def undo_if_undoable(self) -> None:
        """Undo a step that was exchanged but not applied, if it can be; to be called between steps."""
        self._require_complete()
        with self._lock:
            if self._undoable:
                self._drop(self.resumed_numbers())

    def _drop(self, resumed: Container[int] = ()) -> None:
        """Undo the exchange of unapplied results, but of those that were added to only the given buckets'."""
        dropped = [
            bucket for bucket in self._unapplied if not bucket.collected.resumes or bucket.layout.number in resumed
        ]
        if not dropped:
            return
        if not self._undoable:
            raise RuntimeError(
                f"rank {process.job.rank}: gradients were exchanged by backward() and cleared without a step of the "
                "optimizer, but their exchange has changed the residuals: compute gradients that are not applied "
                f"without an exchange ({self.without_exchange}), pass the grad_scaler if it skips steps, or pass "
                "undoable=True, which keeps the state before each step"
            )
        for bucket in reversed(dropped):  # the first one keeps the shared state from before the step
            bucket.undo()
            bucket.collected.resumes = False
            self.step.unapplied.remove(bucket)
        if not self.step.unapplied:
            self.step.enter(State.SKIPPED)

    def progress(self) -> Progress:
        """Return the progress of the exchange, for other threads."""
        running = self._running
        if running is not None:
            return Progress(self.step.number, running.layout.number, running.pipeline.stage)
        return Progress(*self.step.position)

    def leaves_at(self) -> Position:
        """Return step and number of the first bucket that this rank will not exchange if it leaves now."""
        if self._joined:
            return sys.maxsize, 0
        step = self.step
        return (step.number, step.last_begun) if step.error is not None else step.position

    def names(self, bucket: int) -> list[str]:
        """Return the keys of the gradients in a bucket, for reports."""
        return self.buckets[bucket].layout.keys
