"""The same small training through every front end, and through what each of them replaces ("stock").

Gradients are prescribed and exact: their sums and means have no rounding errors in any order. So training at density 1
must have stock's bits. Below density 1 and without momentum, what a parameter lacks must be in the residuals.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch
from laws import everywhere
from sharding import exchanged, grid, parts_of, shard
from states import same
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import MEAN, agree, means, near, settings

import horovod_sparse as hvs
from horovod_sparse.frontends.shards import shard_of

SHAPES = {"first": (300,), "second": (7, 11), "third": (40, 5)}
# The model to be called, the optimizers to step, and what has the exchanges' states.
Attached = tuple[nn.Module, list[Any], list[Any]]
EVERYTHING = hvs.Compression.topka(**settings(density=1.0))
MOMENTUM = {  # of the optimizer, or of the compression alone
    0.5: hvs.Compression.topka(memory="momentum", **settings(density=1.0)),
    0.0: hvs.Compression.dgc(momentum=0.5, masking=False, **settings(density=1.0)),
}
RECOMMENDED = hvs.parse("recommended:collective=topka,density=0.05,dense_below=0,bucket_bytes=1200")
SPARSE = [
    hvs.parse(f"{spec},density=0.05,dense_below=0,bucket_bytes=1200")
    for spec in ("topka:wire=float32", "oktopk:tau_partition=2,tau_threshold=2")
]


class Layer(nn.Module):
    """Layer whose gradient is its second input."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32, device="cpu") % 8 / 4
        self.weight = nn.Parameter(values.view(shape).to(dtype))

    def forward(self, total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the total with the inner product of weight and gradient."""
        product = (self.weight * gradient).sum()
        return total + (product.real if product.is_complex() else product).to(total.dtype)


class Model(nn.Module):
    """Layers, by default those of ``SHAPES``, which run in the order of the given gradients.

    ``reentrant`` chooses how activation checkpoints work; None: there are none.
    """

    def __init__(self, reentrant: bool | None = None, **layers: nn.Module) -> None:
        super().__init__()
        self.reentrant = reentrant
        for name, layer in ({key: Layer(*shape) for key, shape in SHAPES.items()} | layers).items():
            self.add_module(name, layer)

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        total = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        for name, gradient in gradients.items():
            layer: Any = getattr(self, name)
            if self.reentrant is None:
                total = layer(total, gradient)
            else:
                total = checkpoint(layer, total, gradient, use_reentrant=self.reentrant)
        return total


@dataclass
class Setup:
    """What stock needs to know of a training, too.

    Attributes:
        passes: Backward passes in a step.
        prefix: Of the names of parameters.
        unused: Whether ranks may not run the same layers.
        bucket_mb: Size of DDP's buckets.
    """

    passes: int = 1
    prefix: str = ""
    unused: bool = False
    bucket_mb: float = 0.001


def sgd(
    model: nn.Module, momentum: float | None, parameters: Any = None, decay: float = 0.125, **more: Any
) -> list[torch.optim.Optimizer]:
    """Return the optimizer; without momentum (None), the sums of its updates are those of the gradients."""
    more = {"lr": 0.25, "weight_decay": 0 if momentum is None else decay, **more}
    return [torch.optim.SGD(parameters or model.parameters(), momentum=momentum or 0.0, **more)]


@dataclass
class Training:
    """A training through a front end, or through stock.

    Attributes:
        module: What has the parameters.
        model: What computes the loss.
        optimizers: What takes the steps.
        exchanges: What users ask for states and statistics; none for stock.
    """

    front_end: FrontEnd
    module: nn.Module
    model: nn.Module
    optimizers: list[Any]
    exchanges: list[Any]
    scaler: torch.amp.GradScaler
    momentum: float | None
    start: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def optimizer(self) -> Any:
        """The only optimizer."""
        (optimizer,) = self.optimizers
        return optimizer

    @property
    def exchange(self) -> Any:
        """The only exchange."""
        (exchange,) = self.exchanges
        return exchange

    def gradients(self, step: int, *names: str) -> dict[str, torch.Tensor]:
        """Return this rank's gradients of some layers: eighths of integers, whose mean over the ranks is exact."""
        generator = torch.Generator().manual_seed(100 * self.front_end.rank + step)
        layers: dict[str, Any] = dict(self.module.named_children())
        drawn = {
            name: torch.randint(-64, 64, layer.weight.shape, generator=generator, dtype=torch.float32, device="cpu")
            * (self.front_end.ranks / 8 * (1 + 2j if layer.weight.is_complex() else 1))
            for name, layer in layers.items()
        }
        return {name: drawn[name].to(layers[name].weight.dtype) for name in names or layers}

    def backward(self, step: int, *names: str, last: bool = True, overflow: str | None = None) -> torch.Tensor:
        """Run a forward and a backward pass with some layers, by default all; one layer's gradient may overflow."""
        gradients = self.gradients(step, *names)
        if overflow is not None:
            gradients[overflow] = gradients[overflow] + torch.inf
        with self.front_end.accumulating(self, last):
            loss: torch.Tensor = self.model(gradients)
            self.scaler.scale(loss).backward()
        return loss

    def step(self) -> None:
        """Let the optimizers take a step."""
        with self.front_end.reduced(self) if self.scaler.is_enabled() else nullcontext():
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
        self.scaler.update()

    def zero_grad(self, **arguments: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**arguments)

    def take(self, step: int, *names: str, **arguments: Any) -> None:
        """Train for one step."""
        self.zero_grad()
        self.backward(step, *names, **arguments)
        self.step()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of all param groups."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return copies of all parameters, complete, and as real numbers."""
        named: dict[str, Any] = dict(self.module.named_parameters())
        complete = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named.items()}
        return {name: (torch.view_as_real(p) if p.is_complex() else p).detach().clone() for name, p in complete.items()}

    def moved(self) -> dict[str, float]:
        """Return the sum of the updates of each parameter so far."""
        now = self.parameters()
        return {name: (self.start[name].double() - now[name].double()).sum().item() for name in now}

    def owed(self) -> dict[str, float]:
        """Return the sum of the residuals of each parameter on all ranks, as an update."""
        everyone = self.front_end.comm.allgather(dict.fromkeys(self.start, 0.0) | self.front_end.owed(self))
        return {name: sum(of_rank[name] for of_rank in everyone) for name in self.start}

    def states(self) -> list[Any]:
        """Return the states of the exchanges on this rank."""
        return [self.front_end.state(exchange) for exchange in self.exchanges]

    def save(self) -> list[Any]:
        """Return copies of the states of model, optimizers and exchanges on this rank."""
        return copy.deepcopy([part.state_dict() for part in (self.module, *self.optimizers)] + self.states())

    def load(self, states: list[Any]) -> None:
        parts = (self.module, *self.optimizers)
        for part, state in zip(parts, states, strict=False):
            part.load_state_dict(state)
        for exchange, state in zip(self.exchanges, states[len(parts) :], strict=True):
            self.front_end.load(exchange, state)


def train(training: Training) -> None:
    """Train for six steps."""
    for step in range(6):
        training.take(step)


@dataclass
class FrontEnd:
    """A front end, and the stock that it replaces.

    Attributes:
        comm: Communicator of all ranks.
        given: Value of the fixture that the front end needs.
    """

    comm: Any
    given: Any = None

    needs: ClassVar[str | None] = None  # fixture
    momentum: ClassVar[float | None] = 0.5  # of the optimizers, where training is to have stock's bits
    replaces_momentum: ClassVar[bool] = True  # whether a compression may apply the momentum

    @property
    def name(self) -> str:
        """Name of the front end in the table."""
        return next(name for name, kind in FRONT_ENDS.items() if kind is type(self))

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.comm.Get_rank()

    @property
    def ranks(self) -> int:
        """World size."""
        return self.comm.Get_size()

    @property
    def ranks_that_share_data(self) -> int:
        """Ranks of one replica of the model, which use the same parameters."""
        return 1

    @property
    def replica(self) -> int:
        """Number of this rank's replica of the model."""
        return self.rank // self.ranks_that_share_data

    def everywhere(self, holds: Any) -> bool:
        """Return whether something holds on all ranks."""
        return everywhere(self.comm, holds)

    def prepare(self, model: nn.Module, compression: Any, unused: bool) -> nn.Module:
        """Return the model whose parameters the optimizer gets."""
        del compression, unused
        return model

    def attach(self, model: Any, optimizers: list[Any], compression: Any, setup: Setup, **more: Any) -> Attached:
        """Connect a model and its optimizers to the exchange; stock without a compression."""
        raise NotImplementedError

    def accumulating(self, training: Training, last: bool) -> AbstractContextManager[Any]:
        """Return a context in which gradients are only accumulated, unless the pass is the last one of a step."""
        del training, last
        return nullcontext()

    def reduced(self, training: Training) -> AbstractContextManager[Any]:
        """Return a context for the steps of optimizers in which gradients are reduced already."""
        del training
        return nullcontext()

    def uneven(self, training: Training) -> AbstractContextManager[Any]:
        """Return a context in which ranks may take different numbers of steps."""
        raise NotImplementedError

    def owed(self, training: Training) -> dict[str, float]:
        """Return the sum of this rank's residuals of each parameter, as an update."""
        sizes = {name: shard_of(p).numel() for name, p in training.module.named_parameters()}
        totals = Counter[str]()
        for bucket in self.buckets(training):
            if "memory" not in bucket:  # sent dense
                continue
            parts = torch.as_tensor(bucket["memory"]["residual"]).split([sizes[name] for name in bucket["parameters"]])
            for name, part in zip(bucket["parameters"], parts, strict=True):
                totals[name] += bucket["unit"] * float(part.sum())
        return totals

    def buckets(self, training: Training) -> list[Any]:
        """Return the states of all buckets on this rank."""
        return [bucket for state in training.states() for bucket in state["buckets"]]

    def state(self, exchange: Any) -> Any:
        return exchange.state_dict()

    def load(self, exchange: Any, state: Any) -> None:
        exchange.load_state_dict(state)

    def merge(self, exchange: Any, states: list[Any]) -> Any:
        """Return the state that continues those of other ranks, as if they had been twice as many."""
        return exchange.merge([*states, *states][self.rank :: self.ranks], states[0])[0]

    def training(
        self,
        compression: Any = None,
        momentum: float | None = None,
        make: Callable[[nn.Module, float | None], list[torch.optim.Optimizer]] = sgd,
        model: Callable[[], nn.Module] = Model,
        scaled: bool = False,
        **more: Any,
    ) -> Training:
        """Return a new training; stock if there is no compression.

        ``more``: fields of ``Setup``, and arguments of the front end.
        """
        setup = Setup(**{one.name: more.pop(one.name) for one in fields(Setup) if one.name in more})
        module = self.prepare(model(), compression, setup.unused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        more |= {"grad_scaler": scaler} if scaled else {}
        attached = self.attach(module, make(module, momentum), compression, setup, **more)
        training = Training(self, module, *attached, scaler, momentum)
        training.start = training.parameters()
        return training

    @property
    def sparse(self) -> list[tuple[Any, float | None]]:
        """Compressions below density 1, each with momentum of the optimizer."""
        return [(one, None) for one in SPARSE] + [(RECOMMENDED, 0.5)] * self.replaces_momentum

    def check_bits(self, situation: Callable[..., Any], plain: Callable[..., Any] = train, **given: Any) -> None:
        """Assert that a situation has the bits of a plain training, below density 1."""
        for compression, momentum in self.sparse:
            ends = []
            for steps in (situation, plain):
                training = self.training(compression, momentum, **given)
                steps(training)
                ends.append(training.parameters())
            assert self.everywhere(same(*ends)), f"not the bits of the plain training: {compression}"

    def check(
        self,
        situation: Callable[..., Any] = train,
        like: Callable[..., Any] | None = None,
        count: int = 1,
        below: bool = True,
        dgc: bool = True,
        tolerance: float = 1e-5,
        stock: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Assert that a situation has stock's bits at density 1, and below loses nothing and has the same bits.

        Stock may do something ``like`` it, or have other arguments. The tolerance is that of momentum which the
        compression applies; sums below density 1 have a hundredfold.
        """

        def run(compression: Any, momentum: float | None) -> list[Training]:
            arguments = {**given, **(stock or {})} if compression is None else given
            prefixes = [f"{number}." * (count > 1) for number in range(count)]
            trainings = [self.training(compression, momentum, prefix=prefix, **arguments) for prefix in prefixes]
            (like or situation if compression is None else situation)(*trainings)
            assert all(agree(self.comm, training.parameters().values()) for training in trainings)
            return trainings

        expected = run(None, self.momentum)
        for ours, theirs in zip(run(EVERYTHING, self.momentum), expected, strict=True):
            assert self.everywhere(same(ours.parameters(), theirs.parameters())), "not stock's bits"
        for momentum, compression in MOMENTUM.items() if self.replaces_momentum else ():
            if momentum or dgc:  # the compression's own is SGD's, of gradients that take part on every rank
                for ours, theirs in zip(run(compression, momentum), expected, strict=True):
                    values = (one.parameters().values() for one in (ours, theirs))
                    assert self.everywhere(near(*values, tolerance)), f"not stock's momentum: {compression}"
        if below and self.replaces_momentum:
            run(RECOMMENDED, self.momentum)
        dense = (expected if self.momentum is None else run(None, None)) if below else []
        specs = SPARSE if given.get("unused") else SPARSE[:1]  # the owners of sums depend on who sends
        for compression in specs if below else ():
            for ours, theirs in zip(run(compression, None), dense, strict=True):
                moved, owed, given_ = ours.moved(), ours.owed(), theirs.moved()
                lost = {name: moved[name] + owed[name] - given_[name] for name in moved}
                assert self.everywhere(all(abs(one) < 100 * tolerance for one in lost.values())), f"lost: {lost}"
                assert self.everywhere(self.ranks == 1 or any(owed.values())), "nothing was held back"


class Horovod(FrontEnd):
    """``DistributedOptimizer``; stock is Horovod's."""

    needs = "hvd"

    def attach(self, model: Any, optimizers: list[Any], compression: Any, setup: Setup, **more: Any) -> Attached:
        if compression is None and any(p.is_complex() for p in model.parameters()):  # which stock refuses
            return averaging(self.comm, model, optimizers)
        if compression is None:
            wrap = self.given.DistributedOptimizer
        else:
            wrap = partial(hvs.DistributedOptimizer, compression=compression, **more)
        wrapped = [
            wrap(one, named_parameters=named, backward_passes_per_step=setup.passes)
            for one, named in zip(optimizers, named_of(model, optimizers, setup.prefix), strict=True)
        ]
        return model, wrapped, [] if compression is None else wrapped

    def reduced(self, training: Training) -> AbstractContextManager[Any]:
        if training.exchanges and training.scaler.is_enabled():  # which makes our optimizer reduce them
            return nullcontext()
        (optimizer,) = training.optimizers
        optimizer.synchronize()
        return optimizer.skip_synchronize()

    def state(self, exchange: Any) -> Any:
        return exchange.compression_state_dict()

    def load(self, exchange: Any, state: Any) -> None:
        exchange.load_compression_state_dict(state)

    def merge(self, exchange: Any, states: list[Any]) -> Any:
        return super().merge(exchange.exchange, states)

    def buckets(self, training: Training) -> list[Any]:
        buckets = super().buckets(training)
        for bucket in buckets:
            bucket["parameters"] = [name.removeprefix("0.").removeprefix("1.") for name in bucket["parameters"]]
        return buckets

    @contextmanager
    def uneven(self, training: Training) -> Iterator[None]:
        yield
        last = self.given.join()
        self.given.broadcast_parameters(training.module.state_dict(), root_rank=last)
        self.given.broadcast_optimizer_state(training.optimizers[0], root_rank=last)


class Local(Horovod):
    """``LocalOptimizer`` with rounds of one step, which then is ``DistributedOptimizer``; stock is Horovod's."""

    momentum, replaces_momentum = None, False  # each rank would have its own

    def attach(self, model: Any, optimizers: list[Any], compression: Any, setup: Setup, **more: Any) -> Attached:
        if compression is None:
            return super().attach(model, optimizers, None, setup)
        wrapped = [
            hvs.LocalOptimizer(one, named, 1, compression, MEAN)
            for one, named in zip(optimizers, named_of(model, optimizers, setup.prefix), strict=True)
        ]
        return model, wrapped, wrapped

    def state(self, exchange: Any) -> Any:
        return exchange.exchange.state_dict()

    def load(self, exchange: Any, state: Any) -> None:
        exchange.exchange.load_state_dict(state)


class DDP(FrontEnd):
    """``sparse_hook``; stock is DDP."""

    needs = "group"

    def attach(self, model: Any, optimizers: list[Any], compression: Any, setup: Setup, **more: Any) -> Attached:
        replica = DistributedDataParallel(model, bucket_cap_mb=setup.bucket_mb, find_unused_parameters=setup.unused)
        if compression is None:
            return replica, optimizers, []
        state = hvs.ddp.SparseState(compression, optimizers, model.named_parameters(), **more)
        replica.register_comm_hook(state, hvs.ddp.sparse_hook)
        return replica, optimizers, [state]

    def accumulating(self, training: Training, last: bool) -> AbstractContextManager[Any]:
        replica: Any = training.model
        return nullcontext() if last else replica.no_sync()

    def uneven(self, training: Training) -> AbstractContextManager[Any]:
        replica: Any = training.model
        return replica.join()


class FSDP2(DDP):
    """``sparse_all_reduce``; stock is FSDP2 with a mesh of replicas and shards (HSDP)."""

    needs = "mesh"

    @property
    def ranks_that_share_data(self) -> int:
        return self.given["shard"].size()

    def prepare(self, model: nn.Module, compression: Any, unused: bool) -> nn.Module:
        """Return the sharded model; HSDP would hang where replicas run different layers, and DDP has its results."""
        if compression is None and unused:
            return model
        return self.sharded(model, self.given if compression is None else self.given["shard"])

    def sharded(self, model: nn.Module, mesh: Any) -> nn.Module:
        """Return the model, sharded layer by layer; FSDP needs those that share a parameter together."""
        layers: dict[Any, list[nn.Module]] = {}
        for layer in model.children():
            for p in list(layer.parameters())[:1]:
                layers.setdefault(p, []).append(layer)
        return shard(model, mesh, layers.values())

    def attach(self, model: Any, optimizers: list[Any], compression: Any, setup: Setup, **more: Any) -> Attached:
        if compression is None:
            return super().attach(model, optimizers, None, setup) if setup.unused else (model, optimizers, [])
        return model, optimizers, [exchanged(model, self.given, compression, optimizers, **more)]

    def accumulating(self, training: Training, last: bool) -> AbstractContextManager[Any]:
        model: Any = training.module
        if training.model is not model:
            return super().accumulating(training, last)
        model.set_requires_gradient_sync(last)
        return nullcontext()

    def merge(self, exchange: Any, states: list[Any]) -> Any:
        twice = {"replicas": 2 * states[0]["replicas"]}
        others = [{**state, **twice, "replica": state["replica"] + state["replicas"]} for state in states]
        return exchange.merge([{**state, **twice} for state in states] + others)[0]


class Sharded(FSDP2):
    """``sparse_reduce_scatter``; stock is FSDP2, fully sharded."""

    needs = "shards"

    @property
    def ranks_that_share_data(self) -> int:
        return self.ranks

    def prepare(self, model: nn.Module, compression: Any, unused: bool) -> nn.Module:
        return self.sharded(model, self.given)

    def attach(self, model: Any, optimizers: list[Any], compression: Any, setup: Setup, **more: Any) -> Attached:
        if compression is None:
            return model, optimizers, []
        return model, optimizers, [hvs.fsdp.sparse_reduce_scatter(model, compression, optimizers, **more)]

    def owed(self, training: Training) -> dict[str, float]:
        (state,) = training.states()
        units = {
            name: bucket["unit"]
            for bucket in state["buckets"]
            for name in state["layout"].get(bucket["parameters"][0], ())
        }
        return {name: units[name] * float(one.sum()) for name, one in parts_of(state).items()}


class Arrays(FrontEnd):
    """``SparseAllreduce`` of all gradients before each step; stock is a dense sum."""

    replaces_momentum = False

    def attach(self, model: Any, optimizers: list[Any], compression: Any, setup: Setup, **more: Any) -> Attached:
        del setup, more
        if compression is None:
            return averaging(self.comm, model, optimizers)
        parameters, ranks = list(model.parameters()), getattr(self.comm, "transport", self.comm)
        average = hvs.SparseAllreduce(sum(p.numel() for p in parameters), compression, ranks)

        def exchange(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            flat = nn.utils.parameters_to_vector([p.grad for p in parameters])
            mean = torch.from_numpy(average(flat.numpy(), learning_rate=optimizer.param_groups[0]["lr"]))
            for p, gradient in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
                p.grad = gradient.view_as(p)

        (optimizer,) = optimizers
        optimizer.register_step_pre_hook(exchange)
        return model, optimizers, [average]

    def buckets(self, training: Training) -> list[Any]:
        names, (state,) = [name for name, _ in training.module.named_parameters()], training.states()
        unit = training.optimizers[0].param_groups[0]["lr"] / self.ranks
        return [{"parameters": names, "unit": unit, "memory": state["pipeline"]["memory"]}]


def averaging(comm: Any, model: nn.Module, optimizers: list[Any]) -> Attached:
    """Let optimizers apply the mean gradients, which takes the place of stock where there is none."""

    def average(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            (p.grad,) = means(comm, [p.grad])

    for optimizer in optimizers:
        optimizer.register_step_pre_hook(average)
    return model, optimizers, []


def named_of(model: nn.Module, optimizers: list[Any], prefix: str) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield the names and parameters of each optimizer."""
    names = {p: prefix + name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        yield [(names[p], p) for group in optimizer.param_groups for p in group["params"]]


FRONT_ENDS = {"Horovod": Horovod, "DDP": DDP, "FSDP2": FSDP2, "sharded": Sharded, "local": Local, "arrays": Arrays}


def start(
    name: str,
    model: nn.Module,
    make: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer | list[torch.optim.Optimizer]],
    compression: Any,
    **more: Any,
) -> Training:
    """Begin a training of any model, with one shard per replica of FSDP; "stock" is DDP's.

    ``make`` takes the parameters, ``more`` are arguments of the front end.
    """
    front_end: FrontEnd
    if name == "FSDP":
        front_end = FSDP2(None, grid(distributed.get_world_size(), 1))
    else:
        front_end = {"stock": DDP, **FRONT_ENDS}[name](None)
        more |= {"bucket_mb": 25} if isinstance(front_end, DDP) else {}  # torch.compile refuses less
    return front_end.training(
        compression, make=lambda model, _: listed(make(model.parameters())), model=lambda: model, **more
    )


def listed(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a function returned, one or a list."""
    return optimizers if isinstance(optimizers, list) else [optimizers]
