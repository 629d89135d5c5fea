"""Units of a fully sharded model, whose gradients FSDP2 reduces together, and the checks that they need."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from horovod_sparse.config import Sparse
from horovod_sparse.engine.layout import Member
from horovod_sparse.engine.scattered import Shard
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.fsdp.nodes import NodeSums
from horovod_sparse.frontends.shards import shard_of
from horovod_sparse.rules import Mode

# Sparsifiers with which a rank selects for others, or learns from the total of all regions.
_OF_ALL = ("artopk", "deft", "exdyna", "micro")
_DTYPES = (torch.float32, torch.bfloat16)  # in which FSDP divides nothing beforehand


@dataclass(frozen=True)
class Part:
    """Parameter of a unit.

    Attributes:
        p: The parameter.
        width: Number of elements of its largest shard, to which FSDP pads the others.
        key: Key of the gradient, or of the bucket that it shares with others.
        place: First position in each rank's region of that bucket.
        small: Whether it is sent dense, under a key of its own.
    """

    p: DTensor
    width: int
    key: str
    place: int
    small: bool


class Scattering(Protocol):
    """Exchange of the gradients of units."""

    def begin_unit(self, unit: Unit) -> None:
        """Prepare for a unit's gradients, before FSDP changes any gradient of a parameter."""

    def submit(self, unit: Unit, rows: torch.Tensor, sources: Mapping[str, int]) -> None:
        """Exchange the gradients of a unit.

        Args:
            unit: The unit.
            rows: The shards of its gradients, one row for each rank that takes part in the exchange.
            sources: First columns of the parameters that have a gradient.
        """


class Unit:
    """Reduce-scatter of the parameters that FSDP gathers and reduces together, as ``set_custom_reduce_scatter`` takes.

    FSDP calls it, and then the hooks of the parameters whose gradients the input holds, in their order. Only these show
    which parameters have a gradient.

    Args:
        name: Name of the module.
        module: An FSDP module of the unit.
        parts: The trainable parameters by name, in FSDP's order.
        members: What is exchanged, in the size of one rank's region.
    """

    def __init__(self, name: str, module: FSDPModule, parts: Mapping[str, Part], members: Sequence[Member]) -> None:
        self.name, self.parts, self.members = name, parts, members
        self._module = weakref.ref(module)  # which holds this object
        self._nodes: NodeSums | None = None
        self._rows: torch.Tensor | None = None  # the input, by the rank whose shards a row holds
        self._sources: dict[str, int] = {}  # first columns of the parameters that have a gradient
        self._filled = 0  # columns of these

    @property
    def facts(self) -> tuple[Any, ...]:
        """Facts that must be the same on every rank."""
        parts = tuple((name, part.width, part.key, part.place) for name, part in self.parts.items())
        return (self.name, parts, tuple(member.key for member in self.members))

    def shards(self, key: str) -> list[Shard]:
        """Return what each region of a bucket with a selection holds; empty for the keys of small parameters."""
        own = [(name, part) for name, part in self.parts.items() if part.key == key and not part.small]
        return [Shard(name, part.place, part.width, shard_of(part.p).numel()) for name, part in own]

    def attach(self, exchange: Scattering, nodes: NodeSums | None) -> None:
        """Replace FSDP's reduce-scatter; the exchange is not kept alive if it is a proxy."""
        self._exchange, self._nodes = exchange, nodes
        me: Any = weakref.proxy(self)  # garbage collection does not see what torch's hooks hold
        for name, part in self.parts.items():
            p: Any = part.p
            p.register_post_accumulate_grad_hook(_hook(me, name))
        module = self._module()
        assert module is not None
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty tensor, for input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    @eager
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Take the gradients of a unit, and return zeros in the output: the result is added at the end of the pass."""
        del group, op, async_op
        self._exchange.begin_unit(self)
        output_tensor.zero_()
        rows = input_tensor.view(-1, output_tensor.numel())
        self._rows = rows if self._nodes is None else self._nodes.sum(rows)
        self._sources, self._filled = {}, 0

    def reduced(self, name: str) -> None:
        """Note that the input holds the gradient of a parameter; the hook of this parameter."""
        if self._rows is None:
            return
        self._sources[name] = self._filled
        self._filled += self.parts[name].width
        if self._filled == self._rows.shape[1]:
            rows, self._rows = self._rows, None
            self._exchange.submit(self, rows, self._sources)

    def require_complete(self) -> None:
        """Raise RuntimeError if the last input held gradients of parameters without a hook."""
        if self._rows is not None:
            self._rows = None
            raise RuntimeError(
                f"rank {distributed.get_rank()}: FSDP reduced gradients of unknown parameters of {self.name}: "
                "parameters must not be replaced after sparse_reduce_scatter was called, as by "
                "load_state_dict(assign=True)"
            )


def _hook(unit: Unit, name: str) -> Callable[[torch.Tensor], None]:
    return eager(lambda _: unit.reduced(name))


def scattered_units(
    model: nn.Module, parameters: Mapping[str, DTensor], groups: Mapping[torch.Tensor, int], dense_below: int
) -> list[Unit]:
    """Return the units of a model that have trainable parameters, outer ones before those inside.

    Args:
        model: The model.
        parameters: The trainable parameters by name.
        groups: Number of each parameter's param group. A residual follows one learning rate, so that a unit has a
            bucket for each group.
        dense_below: Elements from which on a parameter is selected from.
    """
    names = {p: name for name, p in parameters.items()}
    units: list[Unit] = []
    for name, module, held in _held_together(model):
        parts: dict[str, Part] = {}
        widths: dict[str, int] = {}
        members: dict[str, Member] = {}
        for p in (p for p in held if p in names and p.numel()):
            group, small, width = groups.get(p, -1), p.numel() < dense_below, _width(p)
            key = names[p] if small else f"{name} of group {group}"
            parts[names[p]] = Part(p, width, key, 0 if small else widths.get(key, 0), small)
            widths[key] = widths.get(key, 0) + width
            together = None if small else 1000 * len(units) + len(members)  # a bucket for each key
            members[key] = Member(key, widths[key], torch.float32, p.device, group, together, small)
        if parts:
            units.append(Unit(name, module, parts, list(members.values())))
    return units


def _held_together(model: nn.Module) -> Iterator[tuple[str, FSDPModule, list[DTensor]]]:
    """Yield name and module of each unit, the first one of several, and its parameters."""
    states: dict[Any, tuple[str, FSDPModule]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            states.setdefault(module._get_fsdp_state(), (name or type(model).__name__, module))
    for state, (name, module) in states.items():
        if state._fsdp_param_group is not None:
            held = [sharded.sharded_param for sharded in state._fsdp_param_group.fsdp_params]
            yield name, module, held


def _width(p: DTensor) -> int:
    """Return the number of elements of the largest shard, the first one."""
    return -(-p.shape[0] // p.device_mesh.size()) * (p.numel() // p.shape[0])


def require_scattered(model: nn.Module, call: str) -> DeviceMesh:
    """Return the mesh that shards a model.

    Raises:
        ValueError: FSDP2 shards it over several meshes, over one of two dimensions, or with a setting that is not
            supported; or torch is too old.
    """
    states = {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}
    if not states:
        raise ValueError(f"no module of this {type(model).__name__} is sharded by FSDP2: call fully_shard(model) first")
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError(f"{call} needs FSDPModule.set_custom_reduce_scatter of torch 2.9, not {torch.__version__}")
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if len(meshes) != 1 or any(mesh.ndim != 1 for mesh in meshes):
        raise ValueError(
            f"{call} needs all parameters on one mesh of one dimension, not on {', '.join(map(str, meshes))}: pass "
            "fully_shard such a mesh, or use sparse_all_reduce between replicas"
        )
    for state in states:
        if len(getattr(state, "_fsdp_param_groups", ())) > 1:
            raise ValueError(f"{call} does not support several meshes in one module, from shard_placement_fn")
        unit = state._fsdp_param_group
        for sharded in () if unit is None else unit.fsdp_params:
            _require_supported(sharded.sharded_param, unit, call)
    return meshes.pop()


def _require_supported(p: torch.Tensor, unit: Any, call: str) -> None:
    policy = unit.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or p.dtype
    if p.requires_grad and dtype not in _DTYPES:
        raise ValueError(
            f"gradients are reduced in {dtype}, but {call} supports float32 and bfloat16: set "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32), and keep parameters in float32 or bfloat16"
        )
    if isinstance(p, DTensor) and not p.placements[0].is_shard(0):
        raise ValueError(
            f"{call} supports parameters sharded in dimension 0, not {p.placements}: omit shard_placement_fn"
        )
    if isinstance(unit.offload_policy, CPUOffloadPolicy):
        raise ValueError(f"{call} does not support CPUOffloadPolicy: shard the model without it")


def require_selection(compression: Sparse, call: str) -> None:
    """Raise ValueError if the rules of a compression do not work with a reduce-scatter."""
    if compression.momentum is not None and compression.momentum.max_norm is not None:
        raise ValueError(
            f"max_norm={compression.momentum.max_norm} does not work with {call}, which sends gradients before all of "
            "them are known: set max_norm=None; limit in the compression bounds what a step delivers"
        )
    sparsifier = str(compression.facts()["sparsifier"]["of"])
    if sparsifier in _OF_ALL:
        raise ValueError(
            f"sparsifier {sparsifier!r} does not work with {call}, as each rank gets only its part of the total: use "
            "another one, such as 'topk'"
        )
    if compression.mode is not Mode.SELECT:
        raise ValueError(
            f"collective {compression.facts()['collective']['of']!r} sends everything: use fully_shard alone, or a "
            "density in a preset such as hvs.Compression.topka(density=0.04)"
        )
