"""Fixtures of the front ends' tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def spans() -> Iterator[Any]:
    """Record spans; the value is the function that returns those since the last ``metrics.clear()``."""
    from horovod_sparse import metrics

    metrics.clear()
    metrics.enable()
    yield metrics.spans
    metrics.enable(False)
    metrics.clear()


@pytest.fixture(scope="module")
def meshes_of_group(group: None) -> None:
    """Forget meshes that are equal to later ones, but of a process group that is gone."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


@pytest.fixture(scope="module")
def shards(meshes_of_group: None, comm: Any) -> Any:
    """A mesh of all ranks, each of which holds a shard."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (comm.Get_size(),))


@pytest.fixture(scope="module")
def mesh(meshes_of_group: None, comm: Any) -> Any:
    """Two shards in each replica at an even number of ranks above 2; else each rank is a replica."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = comm.Get_size()
    shards = 2 if ranks % 2 == 0 and ranks > 2 else 1
    return init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


@pytest.fixture
def front_end(request: pytest.FixtureRequest, comm: Any) -> Any:
    """The front end that the parameter names, for a small training: see ``front_ends.FrontEnd``."""
    from front_ends import FRONT_ENDS

    kind = FRONT_ENDS[request.param]
    return kind(comm, request.getfixturevalue(kind.needs) if kind.needs else None)


@pytest.fixture
def set_default() -> Iterator[Any]:
    """Set torch's default dtype or device until the end of the test."""
    import torch

    dtype = torch.get_default_dtype()

    def set_(default: Any) -> None:
        torch.set_default_dtype(default) if isinstance(default, torch.dtype) else torch.set_default_device(default)

    yield set_
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
