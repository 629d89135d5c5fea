"""One bucket of a model: its parameters, its pipeline, and the gradients of the step in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_sparse.config import Sparse
from horovod_sparse.engine.device import Mark, real_dtype
from horovod_sparse.engine.layout import Layout, Slot
from horovod_sparse.engine.pipeline import pipeline_for
from horovod_sparse.engine.state import to_arrays, to_tensors
from horovod_sparse.kernels import copy_to_host, kernels_for
from horovod_sparse.kernels.types import Segments
from horovod_sparse.rules import Step
from horovod_sparse.transport.base import Transport

Facts: TypeAlias = NDArray[np.int64] | None
_WHOLE = Sparse.of(1.0, memory="none", collective="dense")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # that kernels read and write
_HEAD = 64  # elements of a gradient that are looked at before all of them are


class Prepared(NamedTuple):
    """Gradients as a pipeline takes them.

    Attributes:
        given: They, as they were handed in.
        tensors: The same, contiguous and of the bucket's dtype and device.
        outputs: Those as segments.
        gradients: The segments that take part.
        step: Conditions of the step.
    """

    given: list[torch.Tensor]
    tensors: list[torch.Tensor]
    outputs: Segments
    gradients: Segments
    step: Step


class StepGradients:
    """A bucket's gradients of one step.

    Attributes:
        gradients: What was handed in, and is overwritten with the result.
        waiting: Parameters whose gradients are not there yet.
        done: Ends with the exchange, whatever became of it.
        began: Of the exchange, in ns of ``time.perf_counter_ns``.
        ended: Its end.
        prepared: They, once the exchange has begun.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.waiting = set(parameters)
        self.held: set[torch.Tensor] = set()
        self.ready: list[Mark] = []  # where the device stood when each gradient was handed in
        self.finished: Mark = None  # where it stands when the results are there
        self.done: Future[None] = Future()
        self.began = self.ended = 0
        self.prepared: Prepared | None = None


class Bucket:
    """Collects gradients, exchanges them and writes the results where they were.

    Args:
        layout: Its parameters.
        sparse: The configuration of buckets that do not travel whole.
        transport: Communicator of the ranks that take part.
        factor: Factor on the totals: 1/P averages.
        undoable: Whether ``undo`` will be asked for.
        hold_zeros: Whether a gradient of zeros only means that its parameter took no part in the step.
        shared: What rules of all buckets of the model share; None: the bucket is alone.

    Attributes:
        collected: The step in progress.
    """

    def __init__(
        self,
        layout: Layout,
        sparse: Sparse,
        transport: Transport,
        factor: float,
        undoable: bool,
        hold_zeros: bool = False,
        shared: dict[type[Any], Any] | None = None,
    ) -> None:
        self.layout = layout
        self._parameters = frozenset(slot.parameter for slot in layout.slots)
        self.collected = StepGradients(self._parameters)
        self._hold_zeros = hold_zeros
        self._device = layout.device
        self._torch_device = layout.slots[0].parameter.device  # a parameter may be moved later
        self._dtypes = [dtype for dtype in _DTYPES if real_dtype(dtype) == layout.dtype]
        with self._device.work():
            like = self._device.empty(layout.dtype)
            chosen = _WHOLE if layout.dense else sparse
            number = layout.number
            self.pipeline = pipeline_for(chosen, layout.size, like, transport, number, factor, undoable, shared)

    @property
    def missing(self) -> list[Slot]:
        """Places whose gradients are not there yet in this step."""
        return [slot for slot in self.layout.slots if slot.parameter in self.collected.waiting]

    def begin(self, complete: int) -> None:
        """Makes ready for the next step.

        Args:
            complete: When the last gradient of the model was handed in, in ns of ``time.perf_counter_ns``: what the
                exchange took until then was hidden behind the backward pass.
        """
        began, ended = self.collected.began, self.collected.ended
        hidden = max(0, min(ended, complete) - began)
        self.pipeline.counts.hidden += hidden
        self.pipeline.counts.exposed += ended - began - hidden
        self.collected = StepGradients(self._parameters)

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor, hold: bool) -> None:
        """Takes a gradient, as ``Worker.put`` does."""
        collected = self.collected
        collected.gradients[parameter] = gradient
        collected.ready.append(self._device.mark())
        if hold:
            collected.held.add(parameter)
        collected.waiting.discard(parameter)

    def square_norm(self, collected: StepGradients) -> float:
        """Sum of squares of this rank's gradients of a step, without those held; float64."""
        with self._device.work(after=collected.ready):
            taking_part = collected.gradients.keys() - collected.held
            slots = [slot for slot in self.layout.slots if slot.parameter in taking_part]
            tensors = [self._fitting(collected.gradients[slot.parameter]) for slot in slots]
            arrays = [(slot.start, self._device.array_of(tensor)) for slot, tensor in zip(slots, tensors, strict=True)]
            return float(kernels_for(arrays[0][1]).square_norm(arrays)) if arrays else 0.0

    def scale(self, collected: StepGradients, factor: float) -> None:
        """Multiplies this rank's gradients of a step."""
        with self._device.work(after=collected.ready):
            for gradient in collected.gradients.values():
                gradient.data.mul_(factor)  # without a trace in its version, which tells changes by others

    def _prepare(self, collected: StepGradients, conditions: Callable[[], Step]) -> Prepared:
        if collected.prepared is None:
            slots = [slot for slot in self.layout.slots if slot.parameter in collected.gradients]
            given = [collected.gradients[slot.parameter] for slot in slots]
            tensors = [self._fitting(gradient) for gradient in given]
            arrays = [(slot.start, self._device.array_of(tensor)) for slot, tensor in zip(slots, tensors, strict=True)]
            held = self._held(collected, slots, tensors)
            free = [pair for slot, pair in zip(slots, arrays, strict=True) if slot.parameter not in held]
            collected.prepared = Prepared(given, tensors, arrays, free, conditions())
        return collected.prepared

    def facts(self, collected: StepGradients, conditions: Callable[[], Step]) -> Facts:
        """Numbers to be agreed on before the exchange, as ``Pipeline.facts``."""
        with self._device.work(after=collected.ready):
            prepared = self._prepare(collected, conditions)
            return self.pipeline.facts(prepared.gradients, prepared.step)

    def exchange(self, collected: StepGradients, conditions: Callable[[], Step], **facts: Facts) -> Facts:
        """Exchanges the gradients of a step; inside MPI, on whatever thread.

        Args:
            collected: They.
            conditions: Gives the step's.
            **facts: As ``Pipeline.run`` takes them.

        Returns:
            The sums of those taken along.
        """
        with self._device.work(after=collected.ready):
            prepared = self._prepare(collected, conditions)
            sums = self.pipeline.run(prepared.gradients, prepared.outputs, prepared.step, **facts)
            for gradient, tensor in zip(prepared.given, prepared.tensors, strict=True):
                if tensor is not gradient:
                    gradient.data.copy_(tensor)  # without a trace in its version, which tells changes by others
            collected.prepared = None
            collected.finished = self._device.mark()
            return sums

    def _fitting(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as kernels take it; a copy where its memory format, or since then its model, is another one."""
        if gradient.dtype not in self._dtypes or gradient.device != self._torch_device:
            gradient = gradient.to(self._torch_device, self.layout.dtype)
        return gradient if gradient.is_contiguous() else gradient.contiguous()

    def _held(
        self, collected: StepGradients, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]
    ) -> set[torch.Tensor]:
        """Parameters whose residual neither grows nor travels in this step."""
        if not self._hold_zeros:
            return collected.held
        heads = torch.stack([tensor.view(-1)[:_HEAD].any() for tensor in tensors]).tolist()
        suspects = [pair for pair, head in zip(zip(slots, tensors, strict=True), heads, strict=True) if not head]
        return collected.held | {slot.parameter for slot, tensor in suspects if not tensor.any()}

    def follow(self, collected: StepGradients) -> None:
        """Lets what this thread begins from now on come after the results."""
        self._device.follow(collected.finished)

    def undo(self) -> None:
        """Goes back to the state before the step that was exchanged last."""
        with self._device.work():
            self.pipeline.undo()

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Everything the next step depends on, copied to the host by ``copy``, and the names of the parameters."""
        with self._device.work():
            return {"parameters": self.layout.names, **to_tensors(self.pipeline.state_dict(), copy)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        with self._device.work():
            self.pipeline.load_state_dict(to_arrays(state))

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """As ``Pipeline.merge``, for states given by ``state_dict``."""
        with self._device.work():
            merged, notes = self.pipeline.merge([to_arrays(state) for state in states], to_arrays(leader))
            return {"parameters": self.layout.names, **to_tensors(merged)}, notes
