"""States of the exchange of a sharded model, converted to another number of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from horovod_sparse.frontends.shards import Chunk, fill
from horovod_sparse.rules import Mode, Momentum
from horovod_sparse.transport.base import Transport

_RESIDUAL, _HELD, _BUFFER = "residual", "what the optimizer holds", "momentum buffer"


class _Piece(NamedTuple):
    """State of a shard of one parameter.

    Attributes:
        chunk: The shard.
        bucket: State of the bucket that held it.
        arrays: Values of its elements, by name; flat.
    """

    chunk: Chunk
    bucket: Mapping[str, Any]
    arrays: dict[str, torch.Tensor]


class Part(NamedTuple):
    """Part of a sharded model that a rank holds.

    Attributes:
        replica: Number of its replica.
        replicas: Number of replicas.
        chunks: Shards of the parameters, by name.
    """

    replica: int
    replicas: int
    chunks: dict[str, Chunk]

    @classmethod
    def of(cls, transport: Transport, parameters: Mapping[str, torch.Tensor]) -> Part:
        """Return the part of the rank of a transport, whose ranks hold the same shards."""
        return cls(transport.rank, transport.size, {name: Chunk.of(p) for name, p in parameters.items()})

    def facts(self) -> dict[str, Any]:
        """Return entries for a state, by which ``saved`` knows its rank."""
        chunks = {name: tuple(chunk) for name, chunk in self.chunks.items()}
        return {"replica": self.replica, "replicas": self.replicas, "chunks": chunks}

    def saved(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state was saved by this rank, with the same numbers of replicas and shards."""
        of_rank = self[:2] == (state.get("replica"), state.get("replicas"))
        return of_rank and self.chunks == chunks_in(state)

    def require(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless this rank has saved a state."""
        if not self.saved(state):
            raise ValueError(
                f"rank {distributed.get_rank()}: the state is that of replica {state.get('replica')} of "
                f"{state.get('replicas')}, with other shards than this rank or of another model: pass the states of "
                "all ranks to merge, and load what it returns"
            )


def chunks_in(state: Mapping[str, Any]) -> dict[str, Chunk]:
    """Return the shards of the parameters that a rank held when it saved a state.

    Raises:
        ValueError: The state is not that of a sharded model.
    """
    if "chunks" not in state:
        raise ValueError("the state is not one that hvs.fsdp has saved: it does not say which shards it belongs to")
    return {key: Chunk.read(saved) for key, saved in state["chunks"].items()}


def merge_replicas(
    states: Mapping[int, Sequence[Mapping[str, Any]]],
    own: Mapping[str, Any],
    elementwise: bool,
    merge: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], tuple[dict[str, Any], list[str]]],
    momentum_of: Callable[[int], Momentum],
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of this rank that continues those of any numbers of replicas and shards.

    The sum of the residuals of each element over the replicas is unchanged. Replica r takes over the old replicas
    r, r + R, r + 2R and so on, where R is the number of replicas.

    Args:
        states: States of all ranks of the training that is continued, by their replicas.
        own: State of this rank, before its first step.
        elementwise: Argument of ``reshard``.
        merge: ``Exchange.merge``, which takes states of this rank's shards.
        momentum_of: Argument of ``reshard``.

    Returns:
        The state, and notes on what was not carried over.

    Raises:
        ValueError: A state is missing; or the states belong to another model, bucket size or configuration, or
            cannot be converted to this number of shards.
    """
    counts = {state["replicas"] for of_replica in states.values() for state in of_replica}
    if len(counts) > 1:
        raise ValueError(f"the states were saved by {sorted(counts)} replicas: pass those of one save")
    saved = max(counts, default=1)
    mine = range(own["replica"], saved, own["replicas"])
    missing = sorted({0, *mine} - states.keys())
    if missing:
        raise ValueError(f"the states of replicas {missing} are missing: pass those of all ranks")
    if not own["buckets"] or saved == 1:  # one replica exchanges nothing
        merged, notes = merge([], states[0][0])
    else:
        taken = [reshard(states[number], own, elementwise, momentum_of)[0] for number in mine]
        leader, notes = reshard(states[0], own, elementwise, momentum_of)
        merged, more = merge(taken, leader)
        notes = list(dict.fromkeys(notes + more))
    return {**own, **merged}, notes


def reshard(
    states: Sequence[Mapping[str, Any]],
    own: Mapping[str, Any],
    elementwise: bool,
    momentum_of: Callable[[int], Momentum],
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of one replica for the shards and buckets of this rank.

    Residuals, velocities and momentum buffers of each element are copied. States of rules follow the first of the old
    buckets that held elements of a bucket, unless they depend on the bucket's size.

    Args:
        states: States of the shards of the replica; those that hold no elements of this rank may be left out.
        own: State of this rank, before its first step.
        elementwise: Whether the arrays of the memory hold one value for each element.
        momentum_of: Returns the optimizer's momentum for a bucket of this rank, by number.

    Returns:
        The state, in which only buckets are set, and notes on what was not carried over.

    Raises:
        ValueError: The states belong to another model or bucket layout, do not hold all elements of this rank, or
            cannot be converted.
    """
    wanted = chunks_in(own)
    pieces: dict[str, list[_Piece]] = {}
    for state in states:
        for key, piece in _pieces(state):
            if key not in wanted:
                raise ValueError(
                    f"the states hold a residual of {key}, which is not exchanged here: it is another model"
                )
            if wanted[key].overlap(piece.chunk):
                pieces.setdefault(key, []).append(piece)
    mine = {key for bucket in own["buckets"] if "memory" in bucket for key in bucket["parameters"]}
    if pieces.keys() != mine:
        raise ValueError(
            f"the states hold residuals of {sorted(pieces.keys() - mine)}, which are sent dense here, and none of "
            f"{sorted(mine - pieces.keys())}: pass the states of all ranks, of the same model and with its dense_below"
        )
    converted, notes = [], []
    for number, bucket in enumerate(own["buckets"]):
        state, more = _bucket(bucket, wanted, pieces, elementwise, lambda: momentum_of(number))  # noqa: B023
        converted.append(state)
        notes += more
    return {"buckets": converted}, list(dict.fromkeys(notes))


def _pieces(state: Mapping[str, Any]) -> Iterator[tuple[str, _Piece]]:
    """Yield the parts of a state that belong to each parameter that is not sent dense."""
    chunks = chunks_in(state)
    for bucket in state["buckets"]:
        if "memory" not in bucket:
            continue
        arrays = {name: array for name, array in bucket["memory"].items() if isinstance(array, torch.Tensor)}
        arrays[_HELD] = held_in(bucket["handover"], sum(chunks[key].elements for key in bucket["parameters"]))
        start = 0
        for key in bucket["parameters"]:
            end = start + chunks[key].elements
            own = {name: array[start:end] for name, array in arrays.items()}
            if key in bucket.get("buffers", ()):
                own[_BUFFER] = bucket["buffers"][key]
            yield key, _Piece(chunks[key], bucket, own)
            start = end


def held_in(handover: Mapping[str, Any], size: int) -> torch.Tensor:
    """Return the vector of a ``Handover`` with all its positions."""
    values: torch.Tensor = handover["values"]
    if len(values) == size and not len(handover["indices"]):
        return values
    held = values.new_zeros(size)
    held[handover["indices"].long()] = values
    return held


def _bucket(
    own: Mapping[str, Any],
    chunks: Mapping[str, Chunk],
    pieces: Mapping[str, Sequence[_Piece]],
    elementwise: bool,
    momentum: Callable[[], Momentum],
) -> tuple[dict[str, Any], list[str]]:
    """Return the state of one bucket, and notes."""
    keys = own["parameters"]
    if "memory" not in own:
        return {"parameters": keys}, []
    parts = [piece for key in keys for piece in pieces[key]]
    first = parts[0].bucket
    if first["parameters"] == keys and all(piece.chunk == chunks[key] for key in keys for piece in pieces[key]):
        return dict(first), []
    _require_convertible([piece.bucket for piece in parts], keys, elementwise)
    _convert(parts, momentum)

    def assembled(name: str, key: str) -> torch.Tensor:
        array = pieces[key][0].arrays[name].new_empty(chunks[key].sizes)
        fill(array, chunks[key], [(p.chunk, p.arrays[name]) for p in pieces[key]], key)
        return array.flatten()

    def joined(name: str) -> torch.Tensor:
        return torch.cat([assembled(name, key) for key in keys])

    held = joined(_HELD)
    indices = held.nonzero().flatten()
    mode = Mode.ALL if all(map(_plain, parts)) else Mode.SELECT
    handover = {"indices": indices.int(), "values": held[indices], "mode": mode.value}
    memory = {name: joined(name) if name in parts[0].arrays else value for name, value in first["memory"].items()}
    if "of_gradients" in memory:
        memory["of_gradients"] = all(map(_of_gradients, parts))
    fresh = [name for name in ("sparsifier", "schedule") if own[name] and (name == "sparsifier" or _sized(first[name]))]
    state = {
        **{name: value for name, value in own.items() if name not in ("buffers", "schedule", "memory")},
        **{name: first[name] for name in ("unit", "gradient_unit", "mean_unit", "steps", "norm")},
        "memory": memory,
        "schedule": own["schedule"] if "schedule" in fresh else first["schedule"],
        "handover": handover,
    }
    buffers = {key: assembled(_BUFFER, key) for key in keys if _BUFFER in pieces[key][0].arrays}
    notes = [f"the {name} starts from scratch in buckets of other shards" for name in fresh]
    return {**state, "buffers": buffers} if buffers else state, notes


def _convert(parts: Sequence[_Piece], momentum: Callable[[], Momentum]) -> None:
    """Convert pieces whose last step was dense to the form that a selection continues, unless all were dense.

    In the arrays of the pieces: see ``MomentumCorrection`` for residuals, and ``OptimizersMomentum`` for buffers.
    """
    for part in parts:
        if _of_gradients(part) and not all(map(_of_gradients, parts)):
            part.arrays[_RESIDUAL] = part.arrays[_RESIDUAL] * (momentum().share / (1 - momentum().factor))
        if _plain(part) and not all(map(_plain, parts)) and _BUFFER in part.arrays and momentum().nesterov:
            part.arrays[_BUFFER] = part.arrays[_BUFFER] * momentum().factor


def _of_gradients(part: _Piece) -> bool:
    return bool(part.bucket["memory"].get("of_gradients"))


def _plain(part: _Piece) -> bool:
    return Mode(part.bucket["handover"]["mode"]).plain


def _sized(state: Mapping[str, Any]) -> bool:
    """Return whether a rule's state holds arrays, which fit the bucket that it belongs to."""
    return any(isinstance(value, torch.Tensor) and value.numel() > 0 for value in state.values())


def _require_convertible(buckets: Sequence[Mapping[str, Any]], keys: Sequence[str], elementwise: bool) -> None:
    """Raise ValueError unless the values of some old buckets can be put into one new bucket."""
    remedy = "load them with the number of shards they were saved with"
    if not elementwise:
        raise ValueError(
            f"the states hold errors of {', '.join(keys)} in a compressed form, which cannot be divided among other "
            f"shards: {remedy}"
        )
    units = {(0.0 if bucket["mean_unit"] else bucket["unit"], bucket["gradient_unit"]) for bucket in buckets}
    if len(units) > 1:
        raise ValueError(
            f"residuals of {', '.join(keys)} have different units {sorted(units)} on different shards, as after "
            f"gradients that were not finite: {remedy}, or save again after another step"
        )
