"""Wire formats of values, through every collective that rounds."""

from __future__ import annotations

import numpy as np
import pytest
from laws import NARROWER, Case, digest_of, everywhere, make, own_vector, summed

from horovod_sparse.costs import measure
from horovod_sparse.costs.network import Link
from horovod_sparse.vector import SparseVector

narrower = pytest.mark.parametrize(("wire", "dtype"), NARROWER)


def bytes_sent(transport, name, dtype, density, **settings):
    """Return the bytes of the second step, in which thresholds are known."""
    size = 100_000
    indices = np.arange(0, size, round(1 / density), dtype=np.int32)
    vector = SparseVector(indices, np.ones(indices.size, dtype), size, shared=True)
    plain = {} if name == "dense" else {"indices": "plain"}
    collective, counts = make(transport, name, dtype, **plain, **settings), []
    for _ in range(2):
        collective.allreduce(vector, indices.size)
        counts.append(collective.traffic.bytes_sent)
    return counts[1] - counts[0]


# Dense regions of TopkDSA have no indices: they travel with half of the values.
@narrower
@pytest.mark.parametrize(
    ("rule", "density", "index"),
    [
        *((name, 0.05, 4) for name in ("topka", "topkdsa", "gtopk", "oktopk", "hierarchical")),
        ("topkdsa", 1, 2),
        ("shared", 0.05, 0),
        ("dense", 1, 0),
    ],
)
def test_values_take_the_bytes_of_their_wire_format(transport, rule, density, index, wire, dtype):
    nodes = {"node_ranks": 2} if rule == "hierarchical" else {}
    full = bytes_sent(transport, rule, dtype, density, **nodes)
    short = bytes_sent(transport, rule, dtype, density, wire=wire, **nodes)
    expected = full * (index + np.dtype(wire if wire != "bfloat16" else "float16").itemsize)
    expected /= index + np.dtype(dtype).itemsize
    assert everywhere(transport, abs(short - expected) <= 0.02 * expected)
    assert transport.size == 1 or summed(transport, short) > 0


@pytest.mark.parametrize("rule", ["topka", "topkdsa", "gtopk", "oktopk", "spardl", "hierarchical", "auto"])
def test_indices_are_coded_on_slow_links_without_changing_the_total(transport, monkeypatch, rule):
    sent, totals = {}, []
    for speed, beta in (("slow", 8e-9), ("fast", 1e-12), ("coded", 0.0), ("plain", 1.0)):
        monkeypatch.setattr(measure, "measure_link", lambda *_, beta=beta: Link(1e-6, beta))
        monkeypatch.setattr(measure, "measure_coding", lambda *_: 2e-9)
        collective = make(transport, rule, indices=speed if speed in ("coded", "plain") else None)
        vector = own_vector(Case(200_000, "random", seed=4, share=0.01), transport).cut(4000)[0]
        totals.append(collective.allreduce(vector, 4000).total)
        sent[speed] = summed(transport, collective.traffic.bytes_sent)
    assert everywhere(transport, sent["slow"] == sent["coded"] and sent["fast"] == sent["plain"])
    assert everywhere(transport, sent["slow"] < 0.8 * sent["fast"] or transport.size == 1)
    assert everywhere(transport, len({digest_of(total) for total in totals}) == 1)
