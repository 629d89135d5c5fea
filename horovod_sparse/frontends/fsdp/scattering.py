"""Units of a fully sharded model, whose gradients FSDP2 reduces together, and the checks that they need."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from horovod_sparse.config import Sparse
from horovod_sparse.engine.layout import Member
from horovod_sparse.engine.scattered import Shard
from horovod_sparse.frontends.eager import eager, weak_hook
from horovod_sparse.frontends.fsdp.model import single_units_of, units_of
from horovod_sparse.frontends.fsdp.nodes import NodeSums
from horovod_sparse.frontends.shards import shard_of
from horovod_sparse.rules import Mode

if TYPE_CHECKING:
    from horovod_sparse.frontends.fsdp.sharded import ShardedExchange

# Sparsifiers with which a rank selects for others, or learns from the total of all regions.
_OF_ALL = ("artopk", "deft", "exdyna", "micro")
_DTYPES = (torch.float32, torch.bfloat16)  # in which FSDP divides nothing beforehand


@dataclass(frozen=True)
class UnitParameter:
    """Parameter of a unit.

    Attributes:
        p: The parameter.
        width: Number of elements of its largest shard, to which FSDP pads the others.
        bucket_key: Key under which it is exchanged, alone if it is small, else with others of the unit.
        place: First position in each rank's region of what has that key.
        small: Whether it is sent dense.
    """

    p: DTensor
    width: int
    bucket_key: str
    place: int
    small: bool


class Unit:
    """Reduce-scatter of the parameters that FSDP gathers and reduces together, as ``set_custom_reduce_scatter`` takes.

    FSDP calls it, and then the hooks of the parameters whose gradients the input holds, in their order. Only these show
    which parameters have a gradient.

    Args:
        name: Name of the module.
        module: An FSDP module of the unit.
        parameters: The trainable parameters by name, in FSDP's order.
        members: What is exchanged, in the size of one rank's region.
    """

    def __init__(
        self, name: str, module: FSDPModule, parameters: Mapping[str, UnitParameter], members: Sequence[Member]
    ) -> None:
        self.name, self.parameters, self.members = name, parameters, members
        self._module = weakref.ref(module)  # which holds this object
        self._nodes: NodeSums | None = None
        self._rows: torch.Tensor | None = None  # the input, by the rank whose shards a row holds
        self._sources: dict[str, int] = {}  # first columns of the parameters that have a gradient
        self._filled = 0  # columns of these

    @property
    def facts(self) -> tuple[Any, ...]:
        """Facts that must be the same on every rank."""
        places = {
            name: (parameter.width, parameter.bucket_key, parameter.place)
            for name, parameter in self.parameters.items()
        }
        return (self.name, tuple(places.items()), tuple(member.key for member in self.members))

    def shards(self, key: str) -> list[Shard]:
        """Return what each region of a bucket with a selection holds; empty for the keys of small parameters."""
        return [
            Shard(name, parameter.place, parameter.width, shard_of(parameter.p).numel())
            for name, parameter in self.parameters.items()
            if parameter.bucket_key == key and not parameter.small
        ]

    def attach(self, exchange: ShardedExchange, nodes: NodeSums | None) -> None:
        """Replace FSDP's reduce-scatter; the exchange is not kept alive."""
        self._exchange: ShardedExchange = weakref.proxy(exchange)
        self._nodes = nodes
        for name, parameter in self.parameters.items():
            p: Any = parameter.p
            p.register_post_accumulate_grad_hook(weak_hook(self._note_reduced, name))
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
        """Take the gradients of a unit, and return zeros in the output: results are added to ``p.grad`` later."""
        del group, op, async_op
        self._exchange.begin_unit(self)
        output_tensor.zero_()
        rows = input_tensor.view(-1, output_tensor.numel())
        self._rows = rows if self._nodes is None else self._nodes.sum(rows)
        self._sources, self._filled = {}, 0

    def _note_reduced(self, name: str, p: torch.Tensor) -> None:
        """Note that the input holds the gradient of a parameter; the hook of this parameter."""
        del p
        if self._rows is None:
            return
        self._sources[name] = self._filled
        self._filled += self.parameters[name].width
        if self._filled == self._rows.shape[1]:
            rows, self._rows = self._rows, None
            self._exchange.submit_unit(self, rows, self._sources)

    def require_complete(self) -> None:
        """Raise RuntimeError if the last input held gradients of parameters without a hook."""
        if self._rows is not None:
            self._rows = None
            raise RuntimeError(
                f"rank {distributed.get_rank()}: FSDP reduced gradients of unknown parameters of {self.name}: "
                "parameters must not be replaced after sparse_reduce_scatter was called, as by "
                "load_state_dict(assign=True)"
            )


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
    for name, module, record in units_of(model):
        own: dict[str, UnitParameter] = {}
        widths: dict[str, int] = {}
        members: dict[str, Member] = {}
        for p in (sharded.sharded_param for sharded in record.fsdp_params):
            if p not in names or not p.numel():
                continue
            group, small, width = groups.get(p, -1), p.numel() < dense_below, _width(p)
            key = names[p] if small else f"{name} of group {group}"
            own[names[p]] = UnitParameter(p, width, key, widths.get(key, 0), small)
            widths[key] = widths.get(key, 0) + width
            together = None if small else len(units)  # a bucket for each unit and group, of any size
            members[key] = Member(key, widths[key], torch.float32, p.device, group, together, small)
        if own:
            units.append(Unit(name, module, own, list(members.values())))
    return units


def _width(p: DTensor) -> int:
    """Return the number of elements of the largest shard, the first one."""
    return -(-p.shape[0] // p.device_mesh.size()) * (p.numel() // p.shape[0])


def require_scattered(model: nn.Module, call: str) -> DeviceMesh:
    """Return the mesh that shards a model.

    Raises:
        ValueError: FSDP2 shards it over several meshes, over one of two dimensions, or with a setting that is not
            supported; or torch is too old.
    """
    units = single_units_of(model, call)
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ValueError(f"{call} needs FSDPModule.set_custom_reduce_scatter of torch 2.9, not {torch.__version__}")
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    if len(meshes) != 1 or any(mesh.ndim != 1 for mesh in meshes):
        raise ValueError(
            f"{call} needs all parameters on one mesh of one dimension, not on {', '.join(map(str, meshes))}: pass "
            "fully_shard such a mesh, or use sparse_all_reduce between replicas"
        )
    for unit in units:
        for sharded in unit.record.fsdp_params:
            _require_supported(sharded.sharded_param, unit.record, call)
    return meshes.pop()


def _require_supported(p: torch.Tensor, record: Any, call: str) -> None:
    policy = record.mp_policy
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
    if isinstance(record.offload_policy, CPUOffloadPolicy):
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
