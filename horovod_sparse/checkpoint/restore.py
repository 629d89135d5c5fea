"""Collective loading of a checkpoint: from its files into model, optimizer and exchange."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from horovod_sparse.checkpoint.folder import Folder
from horovod_sparse.checkpoint.manifest import Manifest, shard
from horovod_sparse.checkpoint.parts import compare, load_others
from horovod_sparse.checkpoint.sharded import join, layout_of, ranks_for
from horovod_sparse.checkpoint.shards import content_of_rank_0, map_own, read_own, read_shared
from horovod_sparse.checkpoint.state import set_generators
from horovod_sparse.checkpoint.together import CALL, together
from horovod_sparse.control.lifecycle import process
from horovod_sparse.engine.state import leader
from horovod_sparse.frontends.registry import exchange_of
from horovod_sparse.transport.base import Transport

_LOG = logging.getLogger("horovod_sparse")


@dataclass(frozen=True)
class Restored:
    """Result of loading, in addition to the state of model, optimizer and other objects.

    Attributes:
        step: Step passed to ``save``.
        data: Data that this rank passed to ``save``; with another world size, the data of rank 0 on every rank.
        notes: Messages about state that could not be carried over; the same on every rank.
        digest: Digest of the checkpoint, as returned by ``save``.
    """

    step: int
    data: dict[str, Any]
    notes: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class Content:
    """Parts of a checkpoint that this rank needs.

    Attributes:
        manifest: Manifest of the checkpoint.
        shared: Part that is the same on all ranks.
        own: Part of this rank; with another world size, the parts of the old ranks assigned to this rank, if any.
        first: State of the exchange on the old rank 0, without memories, and the data of that rank.
        same: Whether the ranks, and the shards that each of them holds, are those that saved the checkpoint.
        sharded: Parts of the old ranks that hold shards of this rank; None if the model neither was nor is sharded.
    """

    manifest: Manifest
    shared: dict[str, Any]
    own: list[dict[str, Any]]
    first: tuple[dict[str, Any], dict[str, Any]]
    same: bool
    sharded: list[dict[str, Any]] | None


def layouts_of(transport: Transport, what: str, model: nn.Module) -> list[str]:
    """Return ``layout_of`` the model on each rank; a collective call."""
    with together(transport, what):
        layout = layout_of(model)
    return _gathered(transport, layout)


def _gathered(transport: Transport, layout: str) -> list[str]:
    with process.communicating(CALL, transport):
        layouts: list[str] = transport.allgather_object(layout)
    return layouts


def read(transport: Transport, folder: Folder, manifest: Manifest, model: nn.Module) -> Content:
    """Read the parts of a checkpoint that this rank needs; a collective call.

    Raises:
        CheckpointError: A file is damaged or cannot be read, or the files of the ranks do not match. Raised on all
            ranks.
    """
    what, rank = f"step {manifest.step} cannot be loaded", transport.rank
    with together(transport, what):
        place, layout = folder.place(manifest.step), layout_of(model)
    layouts = _gathered(transport, layout)
    content = content_of_rank_0(transport, manifest, place, what) if folder.local else b""
    with together(transport, what):
        shared = read_shared(manifest, place, content)
        mine = range(rank, manifest.ranks, transport.size)
        own = [read_own(manifest, place, old) for old in mine]
        first = (leader(own[0]["compression"]), own[0]["data"]) if rank == 0 else None
    with process.communicating(CALL, transport):
        first = transport.broadcast_object(first)
    assert first is not None
    sharded: list[dict[str, Any]] | None = None
    with together(transport, what):  # ranks with different buckets would wait for each other
        if any(layouts) or any(shared["layouts"]):
            if folder.local and shared["layouts"] != layouts:
                raise ValueError("its ranks held other shards, and a local checkpoint fits only the same ones")
            needed = [rank] if folder.local else ranks_for(shared["layouts"], layouts, rank)
            sharded = [own[0] if old == rank else map_own(manifest, place, old) for old in needed]
        for old, state in zip(mine, own, strict=True):
            if sharded is None and _parameters(leader(state["compression"])) != _parameters(first[0]):
                raise ValueError(
                    f"{place / shard(old)} has different buckets than {shard(0)}: it belongs to another run"
                )
    return Content(manifest, shared, own, first, shared["layouts"] == layouts, sharded)


def _parameters(state: Mapping[str, Any]) -> list[Any]:
    return [bucket["parameters"] for bucket in state["buckets"]]


def restore(
    transport: Transport, content: Content, model: nn.Module, optimizer: Any, exchange: Any, others: dict[str, Any]
) -> Restored:
    """Load the content into model, optimizer, exchange and other objects; a collective call.

    ``exchange`` is the exchange, or the optimizer.

    Raises:
        CheckpointError: The content does not fit. Raised on all ranks; the objects may be partly changed.
    """
    manifest, shared, own = content.manifest, content.shared, content.own
    what = f"step {manifest.step} cannot be loaded"
    with together(transport, what):
        exchange = exchange_of(model, exchange)
        notes = compare(exchange, shared["compression"])
    state, data = content.first
    sparse = shared["compression"] is not None and not notes
    if sparse and not state["buckets"] and state.get("replicas", manifest.ranks) > 1:
        sparse = False  # it was saved before the first step: the exchange starts as it is
    buffers: dict[str, Any] = {}
    if manifest.ranks == transport.size:
        state, data, buffers = own[0]["compression"], own[0]["data"], own[0]["buffers"]
    else:
        notes += _new_ranks(manifest.ranks, transport.size)
    with together(transport, what):
        if sparse and not content.same:
            state, more = _merged(exchange, content, model)
            notes += more
        if content.sharded is not None:
            objects: dict[tuple[Any, ...], Any] = {("model",): model, ("optimizer",): optimizer}
            objects |= {("others", name): other for name, other in others.items()}
            shared = join(shared, [part["shards"] for part in content.sharded], objects)
    with together(transport, what):
        of_model = copy.copy(shared["model"])  # with the modules' versions
        of_model.update(buffers)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(shared["optimizer"])
        notes += load_others(others, shared["others"])
    with together(transport, what):  # what precedes may fail on one rank, and new buckets are created by all
        if sparse:
            exchange.load_state_dict(state)  # last: with local steps, it overwrites parts of the rest
        if own:
            set_generators(own[0]["generators"], model)
    if transport.rank == 0:
        for note in notes:
            _LOG.warning("step %d was loaded, but %s", manifest.step, note)
    return Restored(manifest.step, data, tuple(notes), manifest.digest)


def _merged(exchange: Any, content: Content, model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return the state of the exchange that continues those of other ranks, and notes; a collective call."""
    merged: tuple[dict[str, Any], list[str]]
    if content.sharded is None:
        merged = exchange.merge([part["compression"] for part in content.own], content.first[0])
    elif not layout_of(model):
        raise ValueError(
            "it holds residuals of a sharded model, which an exchange of complete gradients cannot take over: shard "
            "the model with FSDP2, or load it before the exchange is created, which drops the residuals"
        )
    else:
        merged = exchange.merge([part["compression"] for part in content.sharded])
    return merged


def _new_ranks(before: int, now: int) -> list[str]:
    notes = [f"it was saved by {before} ranks and resumes on {now}, with the data and buffers of rank 0"]
    if now > before:
        new = f"rank {before} is" if now == before + 1 else f"ranks {before} to {now - 1} are"
        notes.append(f"{new} new: generators there keep their seeds")
    return notes
