"""The streams of the script and of the exchange never use the same memory without an order, in whatever front end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from laws import everywhere
from stream_order import StreamOrder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import adamw, sgd

import horovod_sparse as hvs
from horovod_sparse.engine import layout
from horovod_sparse.frontends.ddp import bucket
from horovod_sparse.frontends.local_sgd import fragment

pytestmark = pytest.mark.mpi

Optimizer = torch.optim.Optimizer
# What computes the loss, the optimizer that steps, and what returns the state.
FrontEnd = tuple[nn.Module, Any, Callable[[], Any]]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> StreamOrder:
    device = StreamOrder()
    for module in (layout, bucket, fragment):
        monkeypatch.setattr(module, "device_of", lambda _: device)
    return device


def with_horovod(comm: Any, model: nn.Module, optimizer: Optimizer, compression: Any, **more: Any) -> FrontEnd:
    wrapped = hvs.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression, **more)
    return model, wrapped, wrapped.compression_state_dict


def with_ddp(comm: Any, model: nn.Module, optimizer: Optimizer, compression: Any, **more: Any) -> FrontEnd:
    replica = DistributedDataParallel(model, bucket_cap_mb=0.01)
    state = hvs.ddp.SparseState(compression, optimizer, model.named_parameters(), **more)
    replica.register_comm_hook(state, hvs.ddp.sparse_hook)
    return replica, optimizer, state.state_dict


def with_replicas(comm: Any, model: nn.Module, optimizer: Optimizer, compression: Any, **more: Any) -> FrontEnd:
    mesh = init_device_mesh("cpu", (comm.Get_size(), 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    replace(optimizer, model)
    exchange = hvs.fsdp.sparse_all_reduce(model, mesh.get_group("replicate"), compression, optimizer, **more)
    return model, optimizer, exchange.state_dict


def with_shards(comm: Any, model: nn.Module, optimizer: Optimizer, compression: Any, **more: Any) -> FrontEnd:
    mesh = init_device_mesh("cpu", (comm.Get_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    replace(optimizer, model)
    exchange = hvs.fsdp.sparse_reduce_scatter(model, compression, optimizer, **more)
    return model, optimizer, exchange.state_dict


def replace(optimizer: Optimizer, model: nn.Module) -> None:
    """Let the optimizer step the parameters that FSDP has put in place of those that it was made with."""
    optimizer.param_groups[0]["params"] = list(model.parameters())


def local(**settings: Any) -> Callable[..., FrontEnd]:
    def with_local_steps(comm: Any, model: nn.Module, optimizer: Optimizer, compression: Any) -> FrontEnd:
        wrapped = hvs.LocalOptimizer(optimizer, model.named_parameters(), 4, compression, **settings)
        return model, wrapped, wrapped.exchange.state_dict

    return with_local_steps


SPARSE = "density=0.05,dense_below=0"
SPECS = [
    f"topka:{SPARSE},bucket_bytes=4000",
    f"oktopk:{SPARSE},keep=2",
    f"recommended:{SPARSE},collective=topka,bucket_bytes=4000",
    f"conef:{SPARSE}",
]


def train(
    comm: Any, order: StreamOrder, front_end: Any, spec: str, make: Any = sgd, again: Any = None, **more: Any
) -> None:
    """Train for a few steps and assert that no access was without an order.

    Args:
        comm: The ranks.
        order: What notes the accesses.
        front_end: Function that wraps the model.
        spec: The compression.
        make: Function that makes the optimizer.
        again: What a script does between backward() and step(); it gets model, optimizer and the backward pass.
        **more: Further arguments of the front end.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 5))
    generator = torch.Generator().manual_seed(comm.Get_rank())
    with order.watching():
        whole, optimizer, state = front_end(comm, model, make(model), hvs.parse(spec), **more)

        def backward() -> None:
            whole(torch.randn(8, 30, generator=generator)).square().mean().backward()

        for _ in range(5):
            optimizer.zero_grad()
            backward()
            synchronized = again is not None and hasattr(optimizer, "skip_synchronize")  # Horovod's
            if synchronized:
                optimizer.synchronize()
            if again is not None:
                again(whole, optimizer, backward)
            with optimizer.skip_synchronize() if synchronized and again is clip else nullcontext():
                optimizer.step()
            state()
    script, exchange = order.operations
    assert everywhere(comm, script > 100 and (exchange > 10 or comm.Get_size() == 1) and order.known > 100)
    assert everywhere(comm, not order.races), "\n".join(order.races[:3])


def accumulate(model: nn.Module, optimizer: Any, backward: Callable[[], None]) -> None:
    backward()


def drop(model: nn.Module, optimizer: Any, backward: Callable[[], None]) -> None:
    optimizer.zero_grad()
    backward()


def clip(model: nn.Module, optimizer: Any, backward: Callable[[], None]) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


GLOBAL = [*([with_horovod] if find_spec("horovod") else []), with_ddp, with_replicas]


@pytest.fixture
def front_end(request: pytest.FixtureRequest, group: None) -> Any:
    if request.param is with_horovod:
        request.getfixturevalue("hvd")
    return request.param


ALL = [*GLOBAL, with_shards]


def mostly_nightly(*axes: list[Any]) -> list[Any]:
    """Return all combinations, of which one for each value of the first axis is not left to the nightly tests."""
    first, *others = axes
    rest = list(product(*others))
    return [
        pytest.param(one, *more, marks=() if number == 5 * place % len(rest) else pytest.mark.nightly)
        for place, one in enumerate(first)
        for number, more in enumerate(rest)
    ]


@pytest.mark.parametrize(
    ("front_end", "spec", "make"), mostly_nightly(ALL, SPECS, [sgd, adamw]), indirect=["front_end"]
)
def test_a_training(comm: Any, order: StreamOrder, front_end: Any, spec: str, make: Any) -> None:
    train(comm, order, front_end, spec, make)


@pytest.mark.parametrize(("front_end", "again"), mostly_nightly(ALL, [accumulate, drop, clip]), indirect=["front_end"])
def test_what_scripts_do_around_a_step(comm: Any, order: StreamOrder, front_end: Any, again: Any) -> None:
    train(comm, order, front_end, SPECS[0], again=again, undoable=again is drop)


@pytest.mark.nightly
@pytest.mark.parametrize("front_end", GLOBAL, indirect=True)
@pytest.mark.parametrize("spec", ["dense", f"topka:{SPARSE},memory=momentum,max_norm=0.01"])
def test_all_gradients_of_a_step_at_once(comm: Any, order: StreamOrder, front_end: Any, spec: str) -> None:
    train(comm, order, front_end, spec)


STREAMED = [{"fragments": 3, "delay": 2}, {}, {"fragments": 2, "delay": 3, "alpha": 0.5}]


@pytest.mark.parametrize(("settings", "spec"), mostly_nightly(STREAMED, [SPECS[0], SPECS[1], "dense"]))
def test_local_steps(comm: Any, order: StreamOrder, settings: Any, spec: str) -> None:
    train(comm, order, local(**settings), spec)


def test_a_state_that_is_loaded_in_a_round(comm: Any, order: StreamOrder) -> None:
    """The first exchange compares common parameters that come from the state."""

    def reload(model: nn.Module, optimizer: Any, backward: Callable[[], None]) -> None:
        optimizer.load_state_dict(optimizer.state_dict())

    train(comm, order, local(), SPECS[0], again=reload)


# --- what is found ---


def add_one(order: StreamOrder, x: torch.Tensor, marked: bool = True) -> None:
    with order.work([order.mark(order.stream())] if marked else ()):
        x.add_(1)


def found(use: Callable[[StreamOrder, torch.Tensor], Any]) -> list[str]:
    """Return what is found when the script has written a tensor and then does something with it."""
    order = StreamOrder()
    with order.watching():
        use(order, torch.ones(100))
    return [race.partition(",")[0] for race in order.races]


def test_what_has_an_order_is_no_race() -> None:
    def use(order: StreamOrder, x: torch.Tensor) -> None:
        add_one(order, x)
        order.follow()
        x.mul_(2)
        add_one(order, x)
        assert order.known > 3
        with order.work():
            x.sum().item()  # which waits
        x.mul_(2)

    assert found(use) == []


def test_missing_orders_are_found() -> None:
    def without_mark(order: StreamOrder, x: torch.Tensor) -> None:
        add_one(order, x, marked=False)
        order.follow()

    def without_follow(order: StreamOrder, x: torch.Tensor) -> None:
        add_one(order, x)
        torch._foreach_mul_([x], 2)
        order.follow()

    def read_by_the_host(order: StreamOrder, x: torch.Tensor) -> None:
        add_one(order, x)
        x.numpy()
        order.follow()

    def freed(order: StreamOrder, x: torch.Tensor) -> None:
        add_one(order, torch.ones(7))

    what = "memory of a tensor of (100"
    assert found(without_mark) == [f"on the exchange's stream: aten.add_.Tensor writes {what}"]
    assert found(without_follow) == [f"on the script's stream: aten._foreach_mul_.Scalar writes {what}"]
    assert found(read_by_the_host) == [f"on the script's stream: numpy reads {what}"]
    assert "memory of a tensor of (7" in found(freed)[0]
    assert "is freed" not in "".join(found(without_mark))


def test_parts_of_a_tensor_have_orders_of_their_own() -> None:
    def use(order: StreamOrder, x: torch.Tensor) -> None:
        add_one(order, x[:51])
        x[51:].mul_(2)
        order.follow()

    assert found(use) == []
