"""Runs the buckets of one optimizer, each as soon as its gradients are there, in one order on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from horovod_sparse import trace
from horovod_sparse.bucket import Bucket
from horovod_sparse.collectives import Traffic
from horovod_sparse.device import Mark
from horovod_sparse.inside import current_call, inside_mpi
from horovod_sparse.pipeline import Pipeline
from horovod_sparse.stall import Progress
from horovod_sparse.step import Step


class _Filling:
    """A bucket's gradients of the step in progress."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.waiting = {slot.parameter for slot in bucket.slots}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.held: set[torch.Tensor] = set()
        self.ready: list[Mark] = []  # where the device stood when each gradient was handed in
        self.finished: Mark = None  # where it stands when the results are there
        self.done: Future[None] | None = None


class Worker:
    """Exchanges buckets on one thread, so that the exchange overlaps the backward pass.

    Hooks fire in any order and not on every rank alike; buckets start strictly in the order of their numbers,
    so that the ranks' collectives always meet. One thread and one communicator belong to one worker alone.

    Args:
        buckets: All buckets, in the order of exchange.
        pipelines: Their pipelines, in the same order.
        factor: Factor on the totals: 1/P averages.
        conditions: Gives, for an index of a param group, a function that gives the conditions of the step in progress.
            The first is called in the order of the program, the second on the worker's thread, where it may wait for
            the device.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        pipelines: Sequence[Pipeline],
        factor: float,
        conditions: Callable[[int], Callable[[], Step]],
    ) -> None:
        self.buckets = buckets
        self.pipelines = pipelines
        self._factor = factor
        self._conditions = conditions
        self._number_of = {slot.parameter: bucket.number for bucket in buckets for slot in bucket.slots}
        self._lock = threading.Lock()  # autograd runs one thread a device, and each may fire hooks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="horovod_sparse")
        self._unconfirmed = False  # a step was exchanged, but not applied so far
        self._step = -1
        self._running: int | None = None  # the bucket in exchange
        self._begin()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has a place in a bucket."""
        return parameter in self._number_of

    def _begin(self) -> None:
        self._step += 1
        self._filling = [_Filling(bucket) for bucket in self.buckets]
        self._next = 0
        self._failed: BaseException | None = None

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor, hold: bool = False) -> Callable[[], torch.Tensor]:
        """Hands in a gradient; starts the buckets that are complete and whose turn it is.

        Args:
            parameter: A parameter of this worker.
            gradient: Its gradient, dense; overwritten with the result when it is contiguous.
            hold: Keep the parameter's residual out of this step: it neither grows nor travels.

        Returns:
            A function that waits for the bucket and gives the reduced gradient, in the parameter's shape.
        """
        flat = gradient.detach().contiguous()
        with self._lock:
            self._undo_unconfirmed()
            filling = self._filling[self._number_of[parameter]]
            filling.gradients[parameter] = flat
            filling.ready.append(filling.bucket.device.mark())
            if hold:
                filling.held.add(parameter)
            filling.waiting.discard(parameter)
            self._start()
        return lambda: self._result(filling, parameter, gradient)

    def leave_out(self, parameter: torch.Tensor) -> None:
        """Lets the bucket go without a parameter whose gradient takes another way in this step."""
        with self._lock:
            self._undo_unconfirmed()
            filling = self._filling[self._number_of[parameter]]
            filling.waiting.discard(parameter)
            self._start()

    def confirm(self) -> None:
        """The step that was exchanged has been applied."""
        self._unconfirmed = False
        for pipeline in self.pipelines:
            pipeline.confirm()

    def settle(self) -> None:
        """Undoes a step that was exchanged, but not applied; to be called between steps."""
        with self._lock:
            self._undo_unconfirmed()

    def _undo_unconfirmed(self) -> None:
        if self._unconfirmed:
            self._unconfirmed = False
            for bucket, pipeline in zip(self.buckets, self.pipelines, strict=True):
                with bucket.device.work():
                    pipeline.undo()

    def _start(self) -> None:
        while self._next < len(self._filling) and not self._filling[self._next].waiting:
            filling = self._filling[self._next]
            # Read here, in the order of the program: a schedule may change it while the worker is still busy.
            conditions = self._conditions(filling.bucket.group)
            filling.done = self._thread.submit(self._run, filling, conditions)
            self._next += 1

    def _run(self, filling: _Filling, conditions: Callable[[], Step]) -> None:
        if self._failed is not None:
            # Where only this rank failed, the others are still in that bucket: to go on would be to wait for ever.
            raise self._failed
        self._running = filling.bucket.number
        try:
            self._exchange(filling, conditions)
        except BaseException as error:
            self._failed = error
            raise
        finally:
            self._running = None

    def _exchange(self, filling: _Filling, conditions: Callable[[], Step]) -> None:
        bucket = filling.bucket
        with inside_mpi(), bucket.device.work(after=filling.ready):
            slots = [slot for slot in bucket.slots if slot.parameter in filling.gradients]
            arrays = [(slot.start, bucket.device.array_of(filling.gradients[slot.parameter])) for slot in slots]
            free = [pair for slot, pair in zip(slots, arrays, strict=True) if slot.parameter not in filling.held]
            self.pipelines[bucket.number].run(free, arrays, conditions(), self._factor)
            filling.finished = bucket.device.mark()

    def _result(self, filling: _Filling, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        assert filling.done is not None, "a handle was waited for before its bucket was complete"
        self._wait(filling.done, filling.bucket.number)
        filling.done.result()
        filling.bucket.device.follow(filling.finished)
        result = filling.gradients[parameter].view(parameter.shape)
        if gradient.is_contiguous():
            return result
        return torch.empty_like(parameter).copy_(result)  # the parameter's own memory format, such as channels_last

    def _wait(self, done: Future[None], bucket: int) -> None:
        if not done.done():
            with trace.span("wait", bucket=bucket):
                wait([done])

    def finish(self) -> None:
        """Waits for everything that was started, whatever became of it, and makes ready for the next step."""
        for filling in self._filling:
            if filling.done is not None:
                self._wait(filling.done, filling.bucket.number)
        self._unconfirmed = True
        self._begin()

    def progress(self) -> Progress:
        """How far the exchange has come; for other threads."""
        running = self._running
        if running is not None:
            return Progress(self._step, running, self.pipelines[running].stage)
        if self._next < len(self.buckets):
            return Progress(self._step, self._next, call=current_call())
        return Progress(self._step + 1, 0)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far, over all buckets."""
        total = Traffic()
        for pipeline in self.pipelines:
            total.add(pipeline.traffic)
        return total
