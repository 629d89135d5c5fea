"""Residuals of any grid of replicas and shards are those of any other, element by element; without processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding import masses

from horovod_sparse.frontends.reshard import reshard
from horovod_sparse.frontends.shards import Chunk, fill
from horovod_sparse.rules import Momentum

SHAPES = {"weight": (63, 3), "bias": (63,), "row": (1, 5), "last": (7, 2, 2)}
RULES = {
    "unit": 0.5,
    "gradient_unit": 1.0,
    "mean_unit": False,
    "norm": 0.0,
    "steps": 4,
    "sparsifier": {},
    "schedule": {},
    "collective": {},
}


def chunk(shape, shard, shards):
    """As FSDP2 divides: along the first dimension, equal parts but for the last ones, which may be empty."""
    rows = math.ceil(shape[0] / shards)
    start, end = min(shard * rows, shape[0]), min((shard + 1) * rows, shape[0])
    return Chunk(shape, (start, *(0,) * (len(shape) - 1)), (end - start, *shape[1:]))


def state(replica, replicas, shard, shards, most=10**9, fresh=False, seed=0):
    """State of one rank; buckets hold up to ``most`` elements of it, and of a bucket sent dense nothing is kept."""
    chunks = {name: chunk(shape, shard, shards) for name, shape in SHAPES.items()}
    buckets = [[]]
    for name in (name for name in chunks if chunks[name].elements):
        if buckets[-1] and sum(chunks[one].elements for one in (*buckets[-1], name)) > most:
            buckets.append([])
        buckets[-1].append(name)
    saved = [bucket(names, chunks, replica, fresh, seed) for names in buckets if names]
    return {
        "replica": replica,
        "replicas": replicas,
        "chunks": {name: tuple(one) for name, one in chunks.items()},
        "buckets": [{"parameters": ["dense"]}, *saved],
    }


def part(name, chunks, seed):
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    one = chunks[name]
    return values[tuple(slice(o, o + size) for o, size in zip(one.offsets, one.sizes, strict=True))].flatten()


def bucket(names, chunks, replica, fresh, seed):
    residual, velocity, held, buffer = (
        torch.cat([part(name, chunks, seed + 10 * number + of_replica) for name in names]) * (not fresh)
        for number, of_replica in enumerate([replica, replica, 0, 0])
    )
    held = held * (held > 0.5)
    indices = held.nonzero().flatten().int()
    made = {
        **RULES,
        "parameters": names,
        "memory": {"residual": residual, "velocity": velocity, "of_gradients": False},
        "handover": {"indices": indices, "values": held[indices.long()], "mode": "all" if fresh else "select"},
    }
    sizes = [chunks[name].elements for name in names]
    return made if fresh else {**made, "buffers": dict(zip(names, buffer.split(sizes), strict=True))}


def momentum_of(number):
    return Momentum(0.75, nesterov=True, share=0.5)


GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 5))


@given(GRIDS, GRIDS, st.sampled_from([40, 90, 10**9]), st.sampled_from([40, 90, 10**9]))
@settings(deadline=None, max_examples=60)
def test_each_element_keeps_its_residual_and_velocity(old, new, before, now):
    """Bit for bit within a replica: values are copied, and only added up over the old replicas by ``merge``."""
    for replica in range(old[0]):
        saved = [state(replica, old[0], one, old[1], before) for one in range(old[1])]
        converted = []
        for shard in range(new[1]):
            own = state(0, new[0], shard, new[1], now, fresh=True)
            resharded, notes = reshard(saved, own, True, momentum_of)
            converted.append({**own, **resharded})
            assert notes == []
        for name in ("residual", "velocity"):
            ours, expected = masses(converted, name), masses(saved, name)
            assert all(torch.equal(ours[key], expected[key]) for key in SHAPES)
        # What the optimizers hold is converted, too, as if the ranks had trained with these shards.
        wanted = [state(replica, 1, shard, new[1], now) for shard in range(new[1])]
        for ours, expected in zip(converted, wanted, strict=True):
            for one, other in zip(ours["buckets"], expected["buckets"], strict=True):
                assert one["parameters"] == other["parameters"]
                if "memory" in other:
                    assert all(
                        torch.equal(one["handover"][key], other["handover"][key]) for key in ("indices", "values")
                    )
                    assert all(torch.equal(one["buffers"][key], other["buffers"][key]) for key in one["parameters"])
                    assert one["handover"]["mode"] == "select"


def refused(message, change=None, elementwise=True, **of_own):
    saved = [state(0, 2, shard, 2) for shard in range(2)]
    if change is not None:
        change(saved)
    with pytest.raises(ValueError, match=message):
        reshard(saved, {**state(0, 2, 1, 3, fresh=True), **of_own}, elementwise, momentum_of)


def test_states_that_do_not_fit_are_refused_with_the_remedy():
    refused("compressed form.*load them with the number of shards they were saved with", elementwise=False)
    refused(r"none of \['bias', .*pass the states of all ranks", list.clear)
    refused(
        r"hold \d+ elements of weight where this rank needs 63: pass the states of all ranks of one save",
        lambda saved: saved.pop(),
    )
    refused(
        "different units .* on different shards.*save again", lambda saved: saved[0]["buckets"][1].update(unit=0.25)
    )
    refused("does not say which shards", lambda saved: saved[0].pop("chunks"))
    other = {**state(0, 2, 1, 3, fresh=True)["chunks"], "weight": ((64, 3), (22, 0), (22, 3))}
    refused("none of .*'weight'.*of the same model", chunks=other)
    refused("a residual of weight, which is not exchanged here", chunks={"bias": other["bias"]})
    own = state(0, 2, 1, 3, fresh=True)
    own["buckets"][1] = {"parameters": own["buckets"][1]["parameters"]}
    refused(r"residuals of \['bias', .*, which are sent dense here.*with its dense_below", buckets=own["buckets"])


def test_residuals_are_converted_if_only_some_shards_were_dense():
    """Over time, an element x of a residual of gradients becomes the update share / (1 - m) x."""
    saved, own = [state(0, 2, shard, 2) for shard in range(2)], state(0, 2, 0, 1, fresh=True)
    dense = saved[1]["buckets"][1]
    dense["memory"]["of_gradients"], dense["handover"]["mode"] = True, "all"
    dense["handover"] |= {"indices": torch.zeros(0, dtype=torch.int32), "values": torch.zeros(0)}
    (bucket,) = reshard(saved, own, True, momentum_of)[0]["buckets"][1:]
    assert (bucket["memory"]["of_gradients"], bucket["handover"]["mode"]) == (False, "select")
    chunks = {name: Chunk(shape, (0,) * len(shape), shape) for name, shape in SHAPES.items()}
    names = bucket["parameters"]
    start = 0
    for name in names:
        size, here = chunks[name].elements, math.ceil(SHAPES[name][0] / 2) * math.prod(SHAPES[name][1:])
        residual, buffer = part(name, chunks, 0), part(name, chunks, 30)
        got = bucket["memory"]["residual"][start : start + size]
        assert torch.equal(got, torch.cat([residual[:here], residual[here:] * 2]))
        assert torch.equal(bucket["buffers"][name], torch.cat([buffer[:here], buffer[here:] * 0.75]))
        start += size
    for one in saved:  # all of them: nothing is converted
        one["buckets"][1]["memory"]["of_gradients"], one["buckets"][1]["handover"]["mode"] = True, "all"
    (bucket,) = reshard(saved, own, True, momentum_of)[0]["buckets"][1:]
    assert (bucket["memory"]["of_gradients"], bucket["handover"]["mode"]) == (True, "all")
    assert torch.equal(bucket["memory"]["residual"], torch.cat([part(name, chunks, 0) for name in names]))


def test_rules_whose_state_depends_on_the_bucket_start_from_scratch():
    saved, own = [state(0, 2, shard, 2) for shard in range(2)], state(0, 2, 0, 3, fresh=True)
    for one in (*saved, own):
        one["buckets"][1] |= {
            "sparsifier": {"threshold": float(one is not own)},
            "schedule": {"highest": 2.0, "sum": 0.0},
        }
    converted, notes = reshard(saved, own, True, momentum_of)
    assert notes == ["the sparsifier starts from scratch in buckets of other shards"]
    assert converted["buckets"][1]["sparsifier"] == {"threshold": 0.0}
    assert converted["buckets"][1]["schedule"] == {"highest": 2.0, "sum": 0.0}
    saved[0]["buckets"][1]["schedule"] = {"sum": torch.ones(3)}
    converted, notes = reshard(saved, own, True, momentum_of)
    assert "the schedule starts from scratch in buckets of other shards" in notes


def test_parts_that_several_ranks_hold_are_copied_once():
    """As with tensor parallelism, where ranks of a replica hold the same elements."""
    values, target = torch.arange(6.0), torch.empty(2, 2)
    whole, rows = Chunk((3, 2), (0, 0), (3, 2)), Chunk((3, 2), (1, 0), (2, 2))
    fill(target, rows, [(whole, values), (whole, values)], "weight")
    assert torch.equal(target, values.view(3, 2)[1:])
