"""One bucket of a model: its segments, its pipeline, and the gradients of the step in progress."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.engine.device import Mark, real_dtype, real_view
from horovod_sparse.engine.layout import Layout, Segment
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.engine.pipeline.dense import DensePipeline
from horovod_sparse.engine.state import to_arrays, to_tensors
from horovod_sparse.kernels import copy_to_host
from horovod_sparse.kernels.types import Segments
from horovod_sparse.rules import Conditions
from horovod_sparse.transport.base import Transport

_SMALL = Sparse.of(1.0, memory="none", collective="dense")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that kernels read and write


@dataclass(frozen=True)
class Settings:
    """Settings of all buckets of a model.

    Attributes:
        sparse: The configuration of buckets that are not small.
        factor: Factor on the totals; 1/P averages.
        undoable: Whether ``Bucket.undo`` may be called.
        hold_zeros: Whether a gradient of zeros only means that its parameter took no part in the step.
        scatters: Whether each rank gets only its part of a total, unless a bucket is small.
        adaptive: Whether the optimizer is adaptive, as in ``BucketContext``.
    """

    sparse: Sparse
    factor: float = 1.0
    undoable: bool = False
    hold_zeros: bool = False
    scatters: bool = False
    adaptive: bool = False


class Prepared(NamedTuple):
    """Gradients of a step in the form that a pipeline takes.

    Attributes:
        given: Gradients as passed to ``put``.
        tensors: The same gradients, contiguous and of the bucket's dtype and device; copies where they were not.
        outputs: The tensors as segments.
        gradients: The segments that take part.
        conditions: Conditions of the step.
    """

    given: list[torch.Tensor]
    tensors: list[torch.Tensor]
    outputs: Segments
    gradients: Segments
    conditions: Conditions


class StepGradients:
    """Gradients that a bucket collects in one step.

    Args:
        keys: Keys of the gradients to collect.

    Attributes:
        gradients: Gradients by key; overwritten with the result.
        waiting: Keys of the gradients that are still missing.
        held: Keys of the gradients that take no part.
        streams: Streams of the device on which the gradients were computed.
        ready: Points in the device's work at which the gradients are available; empty until the bucket is complete.
        done: Resolved at the end of the exchange, on success and on failure.
        resumes: Whether they are added to the result of the last exchange, which no optimizer has applied.
        began: Start of the exchange, in ns of ``time.perf_counter_ns``.
        ended: End of the exchange.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.waiting = set(keys)
        self.held: set[str] = set()
        self.streams: set[Hashable] = set()
        self.ready: list[Mark] = []
        self.done: Future[None] = Future()
        self.resumes = False
        self.began = self.ended = 0


class Bucket:
    """Collects the gradients of a step, exchanges them and writes the results into their tensors.

    Args:
        layout: The segments.
        settings: Settings of all buckets of the model.
        transport: The ranks that take part.
        shared: State that the rules of all buckets of the model share; None: the bucket is the only one.

    Attributes:
        layout: The segments.
        parts: Positions at which this rank gets the results of gradients.
        device: The device of the gradients.
        pipeline: The pipeline, which holds what is remembered between steps.
        collected: Gradients of the step in progress.
    """

    def __init__(
        self, layout: Layout, settings: Settings, transport: Transport, shared: dict[type[Any], Any] | None = None
    ) -> None:
        self.layout = layout
        self.parts: Sequence[Segment] = layout.segments
        self.collected = StepGradients(layout.keys)
        self._hold_zeros = settings.hold_zeros
        self.device = layout.device
        self._dtypes = [dtype for dtype in _DTYPES if real_dtype(dtype) == layout.dtype]
        with self.device.work():
            self.pipeline = pipeline_for(
                _SMALL if layout.small else settings.sparse,
                layout.size,
                self.device.empty(layout.dtype),
                transport,
                number=layout.number,
                factor=settings.factor,
                undoable=settings.undoable,
                shared=shared,
                layers=[segment.start for segment in layout.segments],
                scatters=settings.scatters,
                adaptive=settings.adaptive,
            )

    def end_step(self, complete: int) -> int:
        """Count the times of a step, and return the nanoseconds of its exchange that were exposed.

        Args:
            complete: Time at which the last gradient of the model was available, in ns of ``time.perf_counter_ns``.
                The part of the exchange before it was hidden behind the backward pass, the rest was exposed.
        """
        began, ended = self.collected.began, self.collected.ended
        hidden = max(0, min(ended, complete) - began)
        exposed = ended - began - hidden
        self.pipeline.counts.hidden += hidden
        self.pipeline.counts.exposed += exposed
        self.collected = StepGradients(self.layout.keys)
        return exposed

    def put(self, key: str, gradient: torch.Tensor, hold: bool) -> None:
        """Take a gradient, as ``Worker.put``."""
        collected = self.collected
        collected.gradients[key] = real_view(gradient)
        collected.streams.add(self.device.stream())
        if hold:
            collected.held.add(key)
        collected.waiting.discard(key)

    def mark_ready(self) -> None:
        """Mark the point in the device's work at which all gradients of the step are available.

        One mark for each stream, when the exchange is submitted: an earlier mark would start nothing earlier.
        """
        collected = self.collected
        if not collected.ready:  # with clipping, the buckets have been marked together
            collected.ready = [self.device.mark(stream) for stream in collected.streams]

    def work(self, collected: StepGradients | None = None) -> AbstractContextManager[None]:
        """Return a context in which work runs on the device's side stream.

        Args:
            collected: Gradients of a step, after which the work is ordered; None: after all that this thread has
                submitted.
        """
        ready = [self.device.mark(self.device.stream())] if collected is None else collected.ready
        return self.device.work(after=ready)

    def _prepare(self, collected: StepGradients, conditions: Callable[[], Conditions]) -> Prepared:
        segments = [segment for segment in self.layout.segments if segment.key in collected.gradients]
        given = [collected.gradients[segment.key] for segment in segments]
        tensors = [self._fitting(gradient) for gradient in given]
        pairs = zip(segments, tensors, strict=True)
        outputs = [(segment.start, self.device.array_of(tensor)) for segment, tensor in pairs]
        held = self._held(collected, segments, tensors)
        taking_part = [pair for segment, pair in zip(segments, outputs, strict=True) if segment.key not in held]
        return Prepared(given, tensors, outputs, taking_part, conditions())

    def exchange(self, collected: StepGradients, conditions: Callable[[], Conditions]) -> None:
        """Exchange the gradients of a step, on any thread.

        Args:
            collected: The gradients.
            conditions: Returns the conditions of the step.
        """
        with self.work(collected):
            if not collected.resumes:
                self.pipeline.forget()  # the step before: an error in what follows must not undo it
            prepared = self._prepare(collected, conditions)
            self.pipeline.run(prepared.gradients, prepared.outputs, prepared.conditions, collected.resumes)
            self._deliver(prepared)

    def start_exchange(self, collected: StepGradients, conditions: Callable[[], Conditions]) -> Callable[[], None]:
        """Start the exchange of a small bucket, as ``DensePipeline.begin``; return what ends it."""
        assert isinstance(self.pipeline, DensePipeline)
        with self.work(collected):
            prepared = self._prepare(collected, conditions)
            end = self.pipeline.begin(prepared.gradients, prepared.outputs, prepared.conditions)

        def finish() -> None:
            with self.work(collected):
                end()
                self._deliver(prepared)

        return finish

    def _deliver(self, prepared: Prepared) -> None:
        """Write the results into the gradients that were copied for the pipeline."""
        for gradient, tensor in zip(prepared.given, prepared.tensors, strict=True):
            if tensor is not gradient:
                gradient.data.copy_(tensor)  # not counted in its version, which detects changes by the user

    def _fitting(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as kernels take it: a copy if its memory format, dtype or device differs."""
        if gradient.dtype not in self._dtypes or gradient.device != self.layout.torch_device:
            gradient = gradient.to(self.layout.torch_device, self.layout.dtype)
        return gradient if gradient.is_contiguous() else gradient.contiguous()

    def _held(self, collected: StepGradients, segments: Sequence[Segment], tensors: Sequence[torch.Tensor]) -> set[str]:
        """Return the keys of gradients whose residual neither grows nor is selected from."""
        if not self._hold_zeros:
            return collected.held
        used = self.device.nonzero(tensors)
        return collected.held | {segment.key for segment, one in zip(segments, used, strict=True) if not one}

    def replace_momentum(self) -> None:
        """Note that the momentum of the optimizer has been replaced, as ``Pipeline.replace_momentum``."""
        with self.device.work():
            self.pipeline.replace_momentum()

    def places(self, part: Segment) -> Sequence[tuple[int, int]]:
        """Return begin and end of all positions of the gradient of one of ``parts``, on which others get results."""
        return [(part.start, part.start + part.size)]

    def undo(self) -> None:
        """Return to the state before the last step."""
        with self.device.work():
            self.pipeline.undo()

    def reset(self) -> None:
        """Return to the state of a new bucket; a collective call."""
        with self.device.work():
            self.pipeline.reset()

    def state_dict(
        self, copy: Callable[[Any], Any] = copy_to_host, buffers: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return everything that the next step depends on, copied to the host by ``copy``, with the keys.

        Args:
            copy: Copies an array to the host.
            buffers: An optimizer's buffers that belong to the state, by the keys of the gradients of all buckets.
        """
        own = {part.key: buffers[part.key].detach() for part in self.parts if part.key in buffers}
        with self.work():  # after the optimizer's step, which writes the buffers
            # In the precision in which gradients are exchanged.
            fitting = {key: one.to(real_dtype(one.dtype)).contiguous() for key, one in own.items()}
            arrays = {"buffers": {key: self.device.array_of(one) for key, one in fitting.items()}} if own else {}
            state = to_tensors({**self.pipeline.state_dict(), **arrays}, copy)
        return {"parameters": self.layout.keys, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        with self.work():
            self.pipeline.load_state_dict(to_arrays(state))

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size, as ``Pipeline.merge``."""
        with self.work():
            merged, notes = self.pipeline.merge([to_arrays(state) for state in states], to_arrays(leader))
            return {"parameters": self.layout.keys, **to_tensors(merged)}, notes
