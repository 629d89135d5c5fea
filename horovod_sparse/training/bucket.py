"""One bucket of an optimizer: its parameters, its pipeline, and the gradients of the step in progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from mpi4py import MPI

from horovod_sparse.compression import Sparse
from horovod_sparse.pipeline import pipeline_for
from horovod_sparse.rules import Step
from horovod_sparse.training.device import Mark
from horovod_sparse.training.layout import Layout
from horovod_sparse.training.state import to_arrays, to_tensors

_WHOLE = Sparse.of(1.0, memory="none", collective="dense")


class Filling:
    """A bucket's gradients of one step.

    Attributes:
        waiting: Parameters whose gradients are not there yet.
        done: The exchange; None before it was started.
    """

    def __init__(self, layout: Layout) -> None:
        self.waiting = {slot.parameter for slot in layout.slots}
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.held: set[torch.Tensor] = set()
        self.ready: list[Mark] = []  # where the device stood when each gradient was handed in
        self.finished: Mark = None  # where it stands when the results are there
        self.done: Future[None] | None = None


class Bucket:
    """Collects gradients, exchanges them and gives the results.

    Args:
        layout: Its parameters.
        sparse: The configuration of buckets that do not travel whole.
        comm: Communicator of the ranks that take part.
        factor: Factor on the totals: 1/P averages.
        undoable: Whether ``undo`` will be asked for.

    Attributes:
        filling: The step in progress.
    """

    def __init__(self, layout: Layout, sparse: Sparse, comm: MPI.Intracomm, factor: float, undoable: bool) -> None:
        self.layout = layout
        self.filling = Filling(layout)
        self._device = layout.device
        with self._device.work():
            like = self._device.empty(layout.dtype)
            chosen = _WHOLE if layout.dense else sparse
            self.pipeline = pipeline_for(chosen, layout.size, like, comm, layout.number, factor, undoable)

    def begin(self) -> None:
        """Makes ready for the next step."""
        self.filling = Filling(self.layout)

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor, hold: bool) -> Callable[[], torch.Tensor]:
        """Takes a gradient, as ``Worker.put`` does; the function returned must be called after the exchange."""
        filling = self.filling
        filling.gradients[parameter] = gradient.detach().contiguous()
        filling.ready.append(self._device.mark())
        if hold:
            filling.held.add(parameter)
        filling.waiting.discard(parameter)

        def result() -> torch.Tensor:
            self._device.follow(filling.finished)
            reduced = filling.gradients[parameter].view(parameter.shape)
            if gradient.is_contiguous():
                return reduced
            return torch.empty_like(parameter).copy_(reduced)  # the parameter's own memory format: channels_last, e.g.

        return result

    def exchange(self, filling: Filling, conditions: Callable[[], Step]) -> None:
        """Exchanges the gradients of a step; inside MPI, on whatever thread."""
        with self._device.work(after=filling.ready):
            slots = [slot for slot in self.layout.slots if slot.parameter in filling.gradients]
            arrays = [(slot.start, self._device.array_of(filling.gradients[slot.parameter])) for slot in slots]
            free = [pair for slot, pair in zip(slots, arrays, strict=True) if slot.parameter not in filling.held]
            self.pipeline.run(free, arrays, conditions())
            filling.finished = self._device.mark()

    def undo(self) -> None:
        """Goes back to the state before the step that was exchanged last."""
        with self._device.work():
            self.pipeline.undo()

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on, as copies on the host, and the names of the parameters."""
        with self._device.work():
            return {"parameters": self.layout.names, **to_tensors(self.pipeline.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state given by ``state_dict``."""
        with self._device.work():
            self.pipeline.load_state_dict(to_arrays(state))

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """As ``Pipeline.merge``, for states given by ``state_dict``."""
        with self._device.work():
            merged, notes = self.pipeline.merge([to_arrays(state) for state in states], to_arrays(leader))
            return {"parameters": self.layout.names, **to_tensors(merged)}, notes
