"""Clipping: one factor for all gradients of a rank, by the norm of all of them."""

from __future__ import annotations

import pytest
import torch

from horovod_sparse.engine.clipping import clip


def halved(norms):
    """Record the norm, and return a factor of a half."""
    return lambda norm: norms.append(norm) or 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_norm_is_that_of_all_gradients_without_the_loss_scale(dtype):
    gradients, norms = [torch.full((3,), 300.0, dtype=dtype), torch.full((1,), 400.0, dtype=dtype)], []
    versions = [gradient._version for gradient in gradients]
    clip(gradients, halved(norms), loss_scale=2.0)
    assert norms == pytest.approx([(3 * 300**2 + 400**2) ** 0.5 / 2], rel=1e-2 if dtype.itemsize == 2 else 1e-6)
    assert [gradient[0].item() for gradient in gradients] == [150, 200]
    assert [gradient._version for gradient in gradients] == versions  # only changes by the user count


def test_16_bits_do_not_overflow():
    norms = []
    clip([torch.full((100,), 60000.0, dtype=torch.float16)], lambda norm: norms.append(norm) or 1.0)
    assert norms == pytest.approx([600000], rel=1e-3)


def test_repeated_rows_of_sparse_gradients_are_added_up_first():
    rows = torch.tensor([[3.0], [1.0], [0.0]])
    gradient = torch.sparse_coo_tensor(torch.tensor([[1, 1, 0]]), rows, (4, 1), check_invariants=True)
    norms = []
    clip([gradient], halved(norms))
    assert norms == [4.0]
    assert gradient.to_dense().ravel().tolist() == [0, 2, 0, 0]


def test_no_gradient_has_norm_0():
    norms = []
    clip([], halved(norms))
    assert norms == [0.0]
