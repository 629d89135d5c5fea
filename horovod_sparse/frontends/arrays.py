"""Sparse allreduce of NumPy and CuPy arrays, without torch, Horovod or an optimizer."""

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
from horovod_sparse.rules import Conditions
from horovod_sparse.rules.states import checked_integer
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

_CALL = "SparseAllreduce"  # in reports of stalls


class SparseAllreduce:
    """Average of arrays over the ranks, sparse and with error feedback between calls.

    ::

        average = hvs.SparseAllreduce(weights.size, "topka:density=0.01")
        for step in range(steps):
            weights -= 0.1 * average(gradient(weights), learning_rate=0.1)

    In each call, a rank adds the array to its residual, sends the entries that the compression selects, and keeps the
    rest in the residual for later calls. The result has the same bits on every rank. Over P ranks and up to rounding,
    P * result + sum of new residuals = sum of (residuals + arrays); a change of the learning rate rescales the
    residuals. If the compression applies momentum, as ``dgc`` does, apply none to the result.

    Arrays of any size are compressed: ``dense_below`` and ``bucket_bytes`` have no effect here. Unlike with
    ``DistributedOptimizer``, a single rank also compresses: with density 0.01, it receives one percent of the entries
    that it has accumulated.

    Construction is a collective call that compares version, size and configuration between the ranks. All ranks must
    then make the same calls in the same order. Each object has a private communicator, so that several objects in one
    process do not interfere.

    Args:
        size: Number of elements n of the arrays.
        compression: A ``Sparse``, usually from ``hvs.Compression``, or a string for ``hvs.parse``.
        comm: Communicator or transport of the ranks that take part; it is duplicated. None: ``MPI.COMM_WORLD``.

    Raises:
        TypeError: The communicator is not an intracommunicator of mpi4py.
        ValueError: An argument is out of range, unknown, or differs between ranks. Raised on all ranks.
        RuntimeError: This process was started as one of several, but MPI knows only this one.
    """

    def __init__(self, size: int, compression: Sparse | str, comm: MPI.Intracomm | Transport | None = None) -> None:
        transport = comm if isinstance(comm, Transport) else _over_mpi(comm)
        facts: dict[str, Any] | Exception = {}
        try:
            self._size = _integer(size, 1, "size must be an integer", "pass array.size")
            self._sparse = _configuration(compression)
            version = horovod_sparse.__version__
            facts = {"version of horovod_sparse": version, "size": self._size, "compression": self._sparse.facts()}
        except Exception as error:
            facts = _on_rank(transport, error)
        with process.communicating(_CALL, transport):
            self._transport = transport.duplicate()
            agree(self._transport, facts)
        self._pipeline: Pipeline | None = None  # created for the first array
        self._loaded: dict[str, Any] | None = None  # initial state of the pipeline
        self._calls = 0
        self._kept = ("", "")  # precision and device of the residuals; empty: any

    def __call__(self, array: Array, *, learning_rate: float = 1.0, epoch: int | None = None) -> Array:
        """Return the average of an array over the ranks; a collective call.

        16-bit arrays are accumulated and summed in float32. If the array of a rank has NaN or Inf, it is sent dense,
        and the mean on every rank includes these values. The residual of that rank is unchanged; the others may keep
        their arrays in theirs for later steps.

        Args:
            array: NumPy or CuPy array of any shape with ``size`` elements, in float32, float64, float16 or (NumPy only)
                bfloat16 of ``ml_dtypes``; not changed. The first array determines device and precision (float64, or
                float32 for all others) for later ones. A CuPy array must be on the current device. ``np.memmap`` is the
                only NumPy subclass accepted: a mean would lose the meaning of others, such as masked arrays.
            learning_rate: Factor with which the result will be applied. When it changes, residuals are rescaled so that
                they are kept in update units. Leave it at 1 for optimizers that normalize the scale of the gradients,
                such as Adam, and where momentum is applied to the result: residuals are then kept in gradient units.
            epoch: Number of the epoch, from 0, for schedules that need it.

        Returns:
            A new array of the same shape and dtype, on the same device.

        Raises:
            TypeError: The array is of another library or of a subclass. Other ranks raise ValueError.
            ValueError: Size, dtype, device, learning rate or epoch is invalid or differs between ranks. Raised on all
                ranks; nothing is changed.
            RuntimeError: The density depends on the epoch, which was not passed.
            Exception: The exchange failed. The array is in the residual: do not pass it again.
        """
        with process.communicating(_CALL, self._transport):
            facts: dict[str, Any] | Exception
            try:
                if epoch is not None:
                    epoch = _integer(epoch, 0, "epoch must be None or an integer", "pass int(epoch)")
                step = Conditions(_checked_rate(learning_rate), epoch=epoch)
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
        """Return the array, or a copy clipped to the ``max_norm`` of the compression's momentum."""
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
        """Return facts about an array that must be the same on every rank; raise an error if it is not supported."""
        device = _device(array)
        if array.dtype not in FORMATS.values():
            raise ValueError(f"arrays must be {', '.join(FORMATS)}, not {array.dtype}: {_conversion(array)}")
        if array.size != self._size:
            raise ValueError(
                f"this SparseAllreduce is for arrays of {self._size} elements, not {array.size} (shape {array.shape}): "
                "create one for each size"
            )
        needed = (_precision(array), device)
        if any(old not in ("", new) for old, new in zip(self._kept, needed, strict=True)):
            kept = " on ".join(filter(None, self._kept))
            raise ValueError(
                f"this SparseAllreduce keeps residuals of {kept}, but the array needs {' on '.join(needed)}: create "
                "one for each"
            )
        return {"dtype": str(array.dtype), "device": device.partition(" ")[0], "number of the call": self._calls}

    def _agree(self, facts: dict[str, Any] | Exception) -> None:
        """Raise an error on all ranks unless they hold the same facts; costs one short message if they do."""
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
        """Return everything that later calls depend on, as copies; every rank has its own state.

        It consists of nested dictionaries of NumPy arrays and plain values. With the default memory, the residual is
        ``["pipeline"]["memory"]["residual"]``.
        """
        state = self._loaded if self._pipeline is None else self._pipeline.state_dict()
        return {**self._identity(), "precision": self._kept[0], "calls": self._calls, "pipeline": _on_host(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on the same rank of the same world size.

        Not a collective call. Before the first call of this object, dtype and device of its residuals are not known: a
        state that does not fit them then raises an error in that call, on all ranks.

        Raises:
            ValueError: The state belongs to another rank, size or compression, or is damaged: a part is missing, of
                another type or size, not finite, or out of range. Or this object has been called already, and the state
                has another precision or is that of an object that had not been called. Nothing is changed.
        """
        self._check(state)
        if self._pipeline is not None:
            self._pipeline.load_state_dict(state["pipeline"])
        else:
            self._loaded, self._kept = _on_host(state["pipeline"]), (state["precision"], "")
        self._calls = int(state["calls"])

    def _check(self, state: Any) -> None:
        """Raise ValueError if a state does not belong to this object; the pipeline checks its own part."""
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
                    "same rank of the same world size returned, into an object with the same arguments"
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

    from horovod_sparse.transport.mpi import MPITransport, require_launcher

    if comm is None:
        require_launcher()
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, not {comm!r}")
    return MPITransport(comm)


def _on_rank(transport: Transport, error: Exception) -> Exception:
    """Return the error with this rank in its message."""
    return type(error)(f"rank {transport.rank}: {error}") if type(error) in (TypeError, ValueError) else error


def _integer(value: Any, least: int, what: str, remedy: str) -> int:
    """Return the value as an int; refuse ``bool`` and arrays, although Python and NumPy would convert them."""
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
            f"learning_rate must be a finite number of at least 0, not {rate!r}: pass float(learning_rate), or omit it "
            "if it is constant"
        )
    return number


def _configuration(compression: Any) -> Sparse:
    # Parsing these two would import Horovod.
    if isinstance(compression, str) and compression.partition(":")[0] not in ("none", "fp16"):
        compression = parse(compression)
    if not isinstance(compression, Sparse):
        raise ValueError(
            f"{compression!r} is not a sparse compression: pass hvs.Compression.topka(density=0.01), the string "
            "'topka:density=0.01' or similar; 'dense' averages without compression"
        )
    if compression.takes_momentum_over:
        raise ValueError(
            "momentum=None uses the momentum of an optimizer, which arrays do not have: set momentum=0.9, or "
            "memory='residual'"
        )
    return compression


def _device(array: Any) -> str:
    """Return the device of an array; raise an error unless it is a plain array on the host or the current GPU."""
    try:
        kernels_for(array)
    except TypeError as error:
        raise TypeError(
            f"{error}: np.asarray(array) converts lists, and arrays of JAX and PyTorch, to NumPy arrays on the host"
        ) from error
    if isinstance(array, np.ndarray) and type(array) not in (np.ndarray, np.memmap):
        raise TypeError(
            f"expected a plain NumPy array, not {type(array).__module__}.{type(array).__name__}, whose meaning would "
            "get lost: pass np.asarray(array), or array.filled(0) for a masked array"
        )
    if isinstance(array, np.ndarray):
        return "cpu"
    here: Any = np.empty(0, np.uint8, like=array)
    gpu, current = array.device.id, here.device.id
    if gpu != current:
        raise ValueError(
            f"the array is on GPU {gpu}, but GPU {current} is the current one: make the call in `with array.device:`"
        )
    return f"cuda {gpu}"


def _conversion(array: Array) -> str:
    """Return the remedy for an array of an unsupported dtype."""
    if array.dtype.kind == "c":
        return f"use array.view('{array.real.dtype}'), which has twice the size"
    return "use array.astype('f4')"


def _precision(array: Array) -> str:
    return "float64" if array.dtype == np.float64 else "float32"


def _on_host(state: Any) -> Any:
    """Return a copy of nested dictionaries in which arrays on any device have become NumPy arrays."""
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    return copy_to_host(state) if hasattr(state, "dtype") else state
