"""Staged copies are independent of their source, and later saves reuse their memory."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from states import same
from torch import nn
from torch.utils._pytree import tree_leaves

from horovod_sparse.checkpoint.staging import Staging


def tensors(state):
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def test_a_copy_does_not_change_with_its_source():
    kinds = (torch.float64, torch.bfloat16, torch.int64, torch.bool)
    state = OrderedDict(
        tensors=[torch.arange(6).reshape(2, 3).to(kind) for kind in kinds],
        parameter=nn.Parameter(torch.ones(3)),
        transposed=torch.arange(6.0).reshape(2, 3).T,
        nothing=(torch.zeros(0), torch.zeros(0, 3)),
        plain={"name": "a", 3: [1.5, None, torch.Size([2]), {"x": (1, 2)}]},
        sparse=torch.eye(3).to_sparse(),
    )
    staging = Staging()
    staging.begin()
    copied = staging.copy(state)
    before = [one.clone() for one in tensors(state)]
    for one in tensors(state):
        if one.layout is torch.strided:
            one.data.zero_()
    state["plain"][3].append("more")
    assert all(torch.equal(a.to_dense(), b.detach().to_dense()) for a, b in zip(tensors(copied), before, strict=True))
    assert copied["plain"] == {"name": "a", 3: [1.5, None, torch.Size([2]), {"x": (1, 2)}]}
    assert copied["transposed"].stride() == (1, 3)


def test_memory_that_fits_is_reused():
    staging, places = Staging(), []
    for length in (1000, 1000, 2000):
        staging.begin()
        array = np.full(length, 7.0)
        kept = torch.from_numpy(staging.array(array))
        copied = staging.copy({"array": kept, "tensor": torch.ones(10)})
        assert copied["array"].data_ptr() == kept.data_ptr(), "what was copied is not copied again"
        array[:] = 0
        assert (kept == 7).all()
        places.append([one.data_ptr() for one in tensors(copied)])
    assert places[0] == places[1]
    assert places[1][0] != places[2][0]
    assert places[1][1] == places[2][1]


def test_tied_parameters_stay_tied():
    layer = nn.Linear(3, 3)
    staging = Staging()
    staging.begin()
    copied = staging.copy({"in": layer.weight, "out": layer.weight.detach(), "row": layer.weight[1]})
    assert copied["in"].data_ptr() == copied["out"].data_ptr()
    assert same(copied["row"], layer.weight[1].detach())
