"""Sparse allreduce of arrays: the pipeline without torch, Horovod or an optimizer."""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import horovod_sparse
from horovod_sparse.config import Sparse, parse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.engine.pipeline import Pipeline, pipeline_for
from horovod_sparse.kernels import copy_to_host, kernels_for
from horovod_sparse.kernels.formats import FORMATS
from horovod_sparse.kernels.types import MAX_SIZE, Array
from horovod_sparse.rules import Step
from horovod_sparse.rules.states import checked_integer
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

_CALL = "SparseAllreduce"  # in reports of stalls


class SparseAllreduce:
    """Averages arrays over the ranks, sparse and with error feedback between the calls.

    ::

        average = hvs.SparseAllreduce(weights.size, "topka:density=0.01")
        for step in range(steps):
            weights -= 0.1 * average(gradient(weights), learning_rate=0.1)

    In each call a rank adds the array to its residual, sends the entries that the compression chooses, and keeps the
    rest for later calls. Law: P * result + sum of the new residuals = sum of (residuals + arrays), over P ranks and up
    to rounding; scaled where the learning rate changes. The result has the same bits on every rank.

    One rank alone does all this, too, as if others were there: with density 0.01 it gets the hundredth of what it has
    accumulated. ``DistributedOptimizer`` exchanges nothing there. Arrays of any size are sent as the compression says;
    ``dense_below`` and ``bucket_bytes`` concern optimizers alone. A compression that applies momentum, such as
    ``dgc``, leaves none to apply to the result.

    To make one is a collective call, which also compares version, size and configuration. All ranks then make the same
    calls in the same order; objects of one process have communicators of their own and do not disturb each other.

    Args:
        size: Elements n of the arrays.
        compression: A ``Sparse``, usually from ``hvs.Compression``, or a text for ``hvs.parse``.
        comm: Communicator of the ranks that take part, by default ``MPI.COMM_WORLD``, or a transport. It is duplicated.

    Raises:
        TypeError: The communicator is none of mpi4py's, or not of one group of ranks.
        ValueError: An argument is out of range, unknown, or not the same on every rank. Raised on all ranks.
    """

    def __init__(self, size: int, compression: Sparse | str, comm: MPI.Intracomm | Transport | None = None) -> None:
        transport = comm if isinstance(comm, Transport) else _over_mpi(comm)
        facts: dict[str, Any] | Exception = {}
        try:
            self._size, self._sparse = _checked_size(size), _configuration(compression)
            version = horovod_sparse.__version__
            facts = {"version of horovod_sparse": version, "size": self._size, "compression": self._sparse.facts()}
        except Exception as error:
            facts = _on_rank(transport, error)
        with process.communicating(_CALL, transport):
            self._transport = transport.duplicate()
            agree(self._transport, facts)
        self._pipeline: Pipeline | None = None  # made for the first array
        self._loaded: dict[str, Any] | None = None  # the state that it will begin with
        self._calls = 0
        self._kept = ("", "")  # precision and device of the residuals; empty: any

    def __call__(self, array: Array, *, learning_rate: float = 1.0, epoch: int | None = None) -> Array:
        """Averages an array over the ranks; a collective call.

        16-bit arrays are accumulated and summed in float32. If an array of any rank has values that are not finite, the
        arrays travel whole, every rank gets their mean with those values in it, and the residuals stay as they were.

        Args:
            array: NumPy or CuPy, of any shape with ``size`` elements; float32, float64, float16 or, of NumPy's,
                bfloat16 (``ml_dtypes``). The first one decides on precision (float64 or not) and device. It is not
                changed. A CuPy array's device must be the current one. Of NumPy's subclasses only ``np.memmap`` is
                accepted: others, such as ``np.matrix`` and masked arrays, have a meaning that a mean would lose.
            learning_rate: Factor by which the result will be applied. When it changes, residuals are rescaled, so that
                they stay the same as updates. For an optimizer that divides by the gradients' own scale, such as Adam,
                leave it at 1: residuals then stay the same as gradients.
            epoch: For densities that depend on it; an integer from 0.

        Returns:
            A new array of the same shape and dtype, on the same device.

        Raises:
            TypeError: It is an array of another library, or a subclass. Other ranks raise ValueError.
            ValueError: Size, dtype, device, learning rate or epoch is wrong, or the ranks' differ. Raised on all ranks,
                and nothing is changed.
            RuntimeError: The density depends on the epoch, which was not given.
            Exception: The exchange failed. The array is in the residual; it must not be handed in again.
        """
        with process.communicating(_CALL, self._transport):
            facts: dict[str, Any] | Exception
            try:
                step = Step(_checked_rate(learning_rate), epoch=_checked_epoch(epoch))
                facts = {**self._facts(array), "learning rate": step.learning_rate, "epoch": step.epoch}
            except Exception as error:
                facts = _on_rank(self._transport, error)
            self._agree(facts)
            pipeline = self._pipeline or self._begin(array)
            flat = self._clipped(array.ravel())  # in C order and contiguous
            result = np.empty(self._size, array.dtype, like=array)
            pipeline.run([(0, flat)], [(0, result)], step)
            self._calls += 1
            return result.reshape(array.shape)

    def _clipped(self, flat: Array) -> Array:
        """The array, or a wide copy of it, whose norm is what the momentum of the compression allows."""
        momentum = self._sparse.momentum
        if momentum is None or momentum.max_norm is None:
            return flat
        kernels = kernels_for(flat)
        factor = momentum.clip(math.sqrt(kernels.square_norm([(0, flat)])), self._transport.size)
        if factor == 1:
            return flat
        wide = np.zeros(self._size, _precision(flat), like=flat)
        kernels.accumulate([(0, flat)], wide)
        wide *= wide.dtype.type(factor)
        return wide

    def _facts(self, array: Array) -> dict[str, Any]:
        """Facts of an array that must be the same on every rank; raises if it cannot be averaged."""
        device = _device(array)
        if array.dtype not in FORMATS.values():
            raise ValueError(f"arrays can be of {', '.join(FORMATS)}, not {array.dtype}: {_conversion(array)}")
        if array.size != self._size:
            raise ValueError(
                f"this SparseAllreduce is for arrays of {self._size} elements, not {array.size} (shape {array.shape}): "
                "make one for each size"
            )
        needed = (_precision(array), device)
        if any(old not in ("", new) for old, new in zip(self._kept, needed, strict=True)):
            kept = " on ".join(filter(None, self._kept))
            raise ValueError(
                f"this SparseAllreduce keeps residuals of {kept}, but the array needs {' on '.join(needed)}: make one "
                "for each"
            )
        return {"dtype": str(array.dtype), "device": device.partition(" ")[0], "number of the call": self._calls}

    def _agree(self, facts: dict[str, Any] | Exception) -> None:
        """Fails on all ranks alike unless all hold the same facts; one short message where they do."""
        mine = -1 if isinstance(facts, Exception) else zlib.crc32(repr(facts).encode())
        everyones = self._transport.allgather_integers(mine)
        if mine < 0 or (everyones != mine).any():
            agree(self._transport, facts)

    def _begin(self, array: Array) -> Pipeline:
        like = np.empty(0, _precision(array), like=array)
        pipeline = pipeline_for(self._sparse, self._size, like, self._transport, factor=1 / self._transport.size)
        error: Exception | None = None
        try:
            if self._loaded is not None:
                pipeline.load_state_dict(self._loaded)
        except ValueError as refused:
            error = refused
        agree(self._transport, error or {})
        self._pipeline, self._loaded, self._kept = pipeline, None, (_precision(array), _device(array))
        return pipeline

    def state_dict(self) -> dict[str, Any]:
        """Everything that later calls depend on, as copies: nested dictionaries of NumPy arrays and plain values.

        Every rank has its own. The residual is ``["pipeline"]["memory"]["residual"]``, with the default memory.
        """
        state = self._loaded if self._pipeline is None else self._pipeline.state_dict()
        return {**self._identity(), "precision": self._kept[0], "calls": self._calls, "pipeline": _on_host(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` gave on the same rank of as many ranks, also before the first call.

        Not a collective call. Before the first call of this object, dtype and device of its residuals are not known:
        what does not fit them is then an error in that call, on all ranks.

        Raises:
            ValueError: The state is of another rank, size or compression, or it is damaged: a part is missing, of
                another type or size, not finite, or out of range. Or this object has been called already, and the state
                is for arrays of another precision, or of an object that had not been called. Nothing is changed.
        """
        self._check(state)
        if self._pipeline is not None:
            self._pipeline.load_state_dict(state["pipeline"])
        else:
            self._loaded, self._kept = _on_host(state["pipeline"]), (state["precision"], "")
        self._calls = int(state["calls"])

    def _check(self, state: Any) -> None:
        """Raises if a state is not one of this object; what is inside of its pipeline is left to the pipeline."""
        rank, own = f"rank {self._transport.rank}", self._identity()
        begun = self._pipeline is not None
        expected = {**own, "precision": self._kept[0], "calls": self._calls, "pipeline": None}
        if not isinstance(state, Mapping) or state.keys() != expected.keys():
            found = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)[:100]
            raise ValueError(
                f"{rank}: a state must be a dict with the keys {sorted(expected)}, not {found}: load what state_dict() "
                "returned"
            )
        for name, value in {**own, **({"precision": self._kept[0]} if begun else {})}.items():
            if state[name] != value:
                raise ValueError(
                    f"{rank}: the state is of {name} {state[name]!r}, this SparseAllreduce of {value!r}: load what the "
                    "same rank of as many ranks gave, into one that was made alike"
                )
        kinds = ("float32", "float64") if isinstance(state["pipeline"], Mapping) else ("",)
        if state["precision"] not in kinds or (not state["precision"] and state["pipeline"] is not None):
            raise ValueError(
                f"{rank}: the state has precision {state['precision']!r}, which does not fit its pipeline "
                f"{type(state['pipeline']).__name__}: load what state_dict() returned"
            )
        checked_integer(state["calls"], f"{rank}: calls of the state")

    def _identity(self) -> dict[str, Any]:
        rank, ranks = self._transport.rank, self._transport.size
        return {"size": self._size, "rank": rank, "ranks": ranks, "compression": self._sparse.facts()}

    @property
    def compression(self) -> Sparse:
        """The configuration."""
        return self._sparse

    @property
    def traffic(self) -> Traffic:
        """Payload that this rank has sent and received so far."""
        return Traffic() if self._pipeline is None else self._pipeline.traffic


def _over_mpi(comm: MPI.Intracomm | None) -> Transport:
    from mpi4py import MPI

    from horovod_sparse.transport.mpi import MPITransport

    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, not {comm!r}")
    return MPITransport(comm)


def _on_rank(transport: Transport, error: Exception) -> Exception:
    """The error with this rank in its message."""
    return type(error)(f"rank {transport.rank}: {error}") if type(error) in (TypeError, ValueError) else error


def _checked_size(size: Any) -> int:
    return _integer(size, 1, "size must be an integer", "give array.size")


def _checked_epoch(epoch: Any) -> int | None:
    return None if epoch is None else _integer(epoch, 0, "epoch must be None or an integer", "give int(epoch)")


def _integer(value: Any, least: int, what: str, remedy: str) -> int:
    """The value as an int; ``bool`` and arrays are no integers here, although Python and NumPy would convert them."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= MAX_SIZE:
        raise ValueError(f"{what} from {least} to {MAX_SIZE}, not {value!r}: {remedy}")
    return int(value)


def _checked_rate(rate: Any) -> float:
    try:
        number = math.nan if isinstance(rate, bool) or not isinstance(rate, numbers.Real) else float(rate)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(
            f"learning_rate must be a finite number of at least 0, not {rate!r}: give float(learning_rate), or leave "
            "it out where it is constant"
        )
    return number


def _configuration(compression: Any) -> Sparse:
    # Those of Horovod would load it.
    if isinstance(compression, str) and compression.partition(":")[0] not in ("none", "fp16"):
        compression = parse(compression)
    if not isinstance(compression, Sparse):
        raise ValueError(
            f"{compression!r} is no sparse compression: give hvs.Compression.topka(density=0.01), its text "
            "'topka:density=0.01' or the like; 'dense' averages whole arrays"
        )
    if compression.takes_momentum_over:
        raise ValueError(
            "momentum=None takes over the momentum of an optimizer, which arrays do not have: give momentum=0.9, or "
            "memory='residual'"
        )
    return compression


def _device(array: Any) -> str:
    """The device of an array; raises if its type is not one of plain arrays."""
    try:
        kind = kernels_for(array).__name__.rpartition(".")[2]
    except TypeError as error:
        raise TypeError(
            f"{error}: np.asarray(array) converts lists, and arrays of JAX and PyTorch, to NumPy arrays on the host"
        ) from error
    if isinstance(array, np.ndarray) and type(array) not in (np.ndarray, np.memmap):
        raise TypeError(
            f"expected a plain NumPy array, not {type(array).__module__}.{type(array).__name__}, whose meaning would "
            "get lost: give np.asarray(array), or array.filled(0) for a masked array"
        )
    return "cpu" if kind == "cpu" else f"{kind} {array.device.id}"


def _conversion(array: Array) -> str:
    """The remedy for an array of another dtype."""
    if array.dtype.kind == "c":
        return f"use array.view('{array.real.dtype}'), which has twice the size"
    return "use array.astype('f4')"


def _precision(array: Array) -> str:
    return "float64" if array.dtype == np.float64 else "float32"


def _on_host(state: Any) -> Any:
    """A copy of nested dictionaries, in which arrays of the device have become NumPy's."""
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    return copy_to_host(state) if hasattr(state, "dtype") else state
