"""Runs the buckets of one optimizer, each as soon as its gradients are there, in one order on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from horovod_sparse import trace
from horovod_sparse.bucket import Bucket, array_of
from horovod_sparse.collectives import Traffic
from horovod_sparse.inside import inside_mpi
from horovod_sparse.pipeline import Pipeline


class _Filling:
    """A bucket's gradients of the step in progress."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.waiting = {slot.parameter for slot in bucket.slots}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.held: set[torch.Tensor] = set()
        self.done: Future[None] | None = None


class Worker:
    """Exchanges buckets on one thread, so that the exchange overlaps the backward pass.

    Hooks fire in any order and not on every rank alike; buckets start strictly in the order of their numbers,
    so that the ranks' collectives always meet. One thread and one communicator belong to one worker alone.

    Args:
        buckets: All buckets, in the order of exchange.
        pipelines: Their pipelines, in the same order.
        factor: Factor on the totals: 1/P averages.
        learning_rate: Gives the learning rate in force for an index of a param group.
        watch: Called with a bucket's number once a second while that bucket is waited for.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        pipelines: Sequence[Pipeline],
        factor: float,
        learning_rate: Callable[[int], float],
        watch: Callable[[int], None],
    ) -> None:
        self.buckets = buckets
        self.pipelines = pipelines
        self._factor = factor
        self._learning_rate = learning_rate
        self._watch = watch
        self._number_of = {slot.parameter: bucket.number for bucket in buckets for slot in bucket.slots}
        self._lock = threading.Lock()  # autograd runs one thread a device, and each may fire hooks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="horovod_sparse")
        self._begin()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has a place in a bucket."""
        return parameter in self._number_of

    def _begin(self) -> None:
        self._filling = [_Filling(bucket) for bucket in self.buckets]
        self._next = 0
        self._failed: BaseException | None = None
        self.idle = False  # set while gradients are collected although this rank had no backward pass

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
            filling = self._filling[self._number_of[parameter]]
            filling.gradients[parameter] = flat
            if hold:
                filling.held.add(parameter)
            filling.waiting.discard(parameter)
            self._start()
        return lambda: self._result(filling, parameter, gradient)

    def leave_out(self, parameter: torch.Tensor) -> None:
        """Lets the bucket go without a parameter whose gradient takes another way in this step."""
        with self._lock:
            filling = self._filling[self._number_of[parameter]]
            filling.waiting.discard(parameter)
            self._start()

    def _start(self) -> None:
        while self._next < len(self._filling) and not self._filling[self._next].waiting:
            filling = self._filling[self._next]
            # Read here, in the order of the program: a schedule may change it while the worker is still busy.
            rate = self._learning_rate(filling.bucket.group)
            filling.done = self._thread.submit(self._run, filling, rate, self.idle)
            self._next += 1

    def _run(self, filling: _Filling, rate: float, idle: bool) -> None:
        if self._failed is not None:
            # Where only this rank failed, the others are still in that bucket: to go on would be to wait for ever.
            raise self._failed
        try:
            self._exchange(filling, rate, idle)
        except BaseException as error:
            self._failed = error
            raise

    def _exchange(self, filling: _Filling, rate: float, idle: bool) -> None:
        bucket = filling.bucket
        slots = [slot for slot in bucket.slots if slot.parameter in filling.gradients]
        arrays = [(slot.start, array_of(filling.gradients[slot.parameter])) for slot in slots]
        free = [pair for slot, pair in zip(slots, arrays, strict=True) if slot.parameter not in filling.held]
        with inside_mpi():
            self.pipelines[bucket.number].run(free, arrays, unit=rate, factor=self._factor, idle=idle)

    def _result(self, filling: _Filling, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        assert filling.done is not None, "a handle was waited for before its bucket was complete"
        self._wait(filling.done, filling.bucket.number)
        filling.done.result()
        result = filling.gradients[parameter].view(parameter.shape)
        if gradient.is_contiguous():
            return result
        return torch.empty_like(parameter).copy_(result)  # the parameter's own memory format, such as channels_last

    def _wait(self, done: Future[None], bucket: int) -> None:
        if not done.done():
            with trace.span("wait", bucket=bucket):
                while wait([done], timeout=1).not_done:
                    self._watch(bucket)

    def finish(self) -> None:
        """Waits for everything that was started, whatever became of it, and makes ready for the next step."""
        for filling in self._filling:
            if filling.done is not None:
                self._wait(filling.done, filling.bucket.number)
        self._begin()

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent and received so far, over all buckets."""
        total = Traffic()
        for pipeline in self.pipelines:
            total.add(pipeline.traffic)
        return total
