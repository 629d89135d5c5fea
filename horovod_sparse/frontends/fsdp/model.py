"""Parameters of a model that FSDP2 shards, and the checks that sparse exchanges need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from horovod_sparse.frontends.eager import eager

# FSDP's private attributes for a factor of the user's; the second one in torch 2.6.
_FACTORS = ("gradient_divide_factor", "reduce_scatter_reduce_op")
# What has saved a state, and an entry that shows it; the first found counts, as LocalOptimizer may save "replica", too.
_SAVERS = {"LocalOptimizer": "local_step", "sparse_all_reduce": "replica", "sparse_reduce_scatter": "shard"}


class FSDPUnit(NamedTuple):
    """Parameters that FSDP gathers and reduces together.

    Attributes:
        name: Name of the first module that holds them.
        module: The module of this name.
        record: FSDP's private record of them.
    """

    name: str
    module: FSDPModule
    record: Any


def parameters_of(model: nn.Module, call: str) -> tuple[dict[str, DTensor], dict[str, torch.Tensor]]:
    """Return the trainable and the frozen parameters of an FSDP2 model by name, as the forward pass gathers them.

    FSDP gathers and reduces the parameters of a module together, without those of the FSDP modules inside it. The
    outermost module comes first: its gradients are the last ones of the backward pass, also those of its last layer.

    Args:
        model: The model.
        call: The user's call, for messages.

    Raises:
        ValueError: A trainable parameter is not sharded by FSDP2, or there is none.
    """
    unit_of: dict[nn.Parameter, int] = {}
    for number, module in enumerate(model.modules()):  # outer modules come before those inside
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                "the model is sharded by FullyShardedDataParallel (FSDP1), whose gradients are not exchanged here: "
                "shard it with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if isinstance(module, FSDPModule):
            unit_of.update(dict.fromkeys(module.parameters(), number))
    if not unit_of:
        raise ValueError(
            f"no module of this {type(model).__name__} is sharded by FSDP2: call fully_shard(model, "
            "mesh=mesh['shard']) first, or use hvs.ddp for a model that is not sharded"
        )
    trainable: dict[str, DTensor] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, p in sorted(model.named_parameters(), key=lambda pair: unit_of.get(pair[1], -1)):
        if not p.requires_grad:
            frozen[name] = p
        elif p in unit_of and isinstance(p, DTensor):
            trainable[name] = p
        else:
            raise ValueError(
                f"{name} is not sharded by FSDP2, which would leave its gradients to each rank: call "
                "fully_shard(model, mesh=mesh['shard']) on the outermost module without ignored_params, or freeze it"
            )
    if not trainable:
        raise ValueError(f"no parameter requires gradients: call {call} before parameters are frozen")
    return trainable, frozen


def require_replicas(parameters: Mapping[str, DTensor], group: distributed.ProcessGroup) -> None:
    """Check that the other ranks of a group hold none of this model's shards, but other copies of this rank's shards.

    Raises:
        ValueError: FSDP averages gradients over the group already, as with a mesh of two dimensions, or the group is
            the one that shards the model.
    """
    replicas = set(distributed.get_process_group_ranks(group))
    for name, p in parameters.items():
        ours = replicas.intersection(p.device_mesh.mesh.flatten().tolist())
        if len(ours) > 1 and any(placement.is_replicate() for placement in p.placements):
            raise ValueError(
                f"{name} is replicated in FSDP's own mesh {p.device_mesh}, over which FSDP averages dense gradients "
                "(HSDP): pass fully_shard the shard dimension alone, mesh=mesh['shard']"
            )
        if len(ours) > 1:
            raise ValueError(
                f"{name} is sharded over ranks {sorted(ours)}, which are in the group of the replicas, too: pass "
                "group=mesh.get_group('replicate'), whose ranks hold the same shard"
            )


def _states_of(model: nn.Module) -> dict[Any, tuple[str, FSDPModule]]:
    """Return FSDP's private states, outer modules first, with name and module of the first that has each."""
    states: dict[Any, tuple[str, FSDPModule]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            states.setdefault(module._get_fsdp_state(), (name or type(model).__name__, module))
    return states


def units_of(model: nn.Module) -> Iterator[FSDPUnit]:
    """Yield the units of a model; a module has several if FSDP shards it over several meshes."""
    for state, (name, module) in _states_of(model).items():
        several = getattr(state, "_fsdp_param_groups", None)
        for record in filter(None, [state._fsdp_param_group] if several is None else several):
            yield FSDPUnit(name, module, record)


def single_units_of(model: nn.Module, call: str) -> list[FSDPUnit]:
    """Return the units of a model, one for each module.

    Args:
        model: The model.
        call: The user's call, for messages.

    Raises:
        ValueError: FSDP2 does not shard the model, or shards a module over several meshes.
    """
    units = list(units_of(model))
    if not any(hasattr(unit.record.mesh_info, "shard_process_group") for unit in units):
        raise ValueError(f"no module of this {type(model).__name__} is sharded by FSDP2: call fully_shard(model) first")
    if len({unit.module for unit in units}) < len(units):
        raise ValueError(f"{call} does not support several meshes in one module, from shard_placement_fn")
    return units


def before_backward(model: nn.Module, hook: Callable[[torch.Tensor], None]) -> None:
    """Call a hook before FSDP prepares one of its modules for a backward pass.

    FSDP finds the outputs of methods that are registered with ``register_fsdp_forward_method``, too, which call no
    forward hook, and those in data classes.

    Args:
        model: The model.
        hook: Called with the gradient of an output; at least once in each backward pass.
    """
    for state in _states_of(model):
        state._pre_backward = _preceded(hook, state._pre_backward)


def _preceded(hook: Callable[[torch.Tensor], None], prepare: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    @eager
    def both(gradient: torch.Tensor) -> Any:
        hook(gradient)
        return prepare(gradient)

    return both


def require_no_divide_factor(units: Iterable[FSDPUnit], effect: str, ranks: str) -> None:
    """Check that FSDP averages gradients over the shards.

    Args:
        units: The units of a model.
        effect: Why a factor of the user's would not have its usual effect, for the message.
        ranks: Number of all ranks, as a term.

    Raises:
        ValueError: It divides them by a factor of the user's.
    """
    for unit in units:
        if any(getattr(unit.record, name, None) is not None for name in _FACTORS):
            raise ValueError(
                f"set_gradient_divide_factor() would not have the effect that it has {effect}: do not call it, and "
                f"multiply the loss by {ranks} / factor instead"
            )


def require_held(units: Iterable[FSDPUnit], parameters: Mapping[str, DTensor]) -> None:
    """Check that FSDP shards the same parameters as before; to be called after a forward pass.

    Attributes of the modules do not show it, because they hold the gathered parameters at times.

    Raises:
        ValueError: A parameter was replaced: the hook that exchanges its gradient is on the old one.
    """
    held = {sharded.sharded_param for unit in units for sharded in unit.record.fsdp_params}
    replaced = [name for name, p in parameters.items() if p not in held]
    if replaced:
        raise ValueError(
            f"{replaced[0]} was replaced after sparse_all_reduce was called, as by load_state_dict(assign=True), and "
            "the gradient of the new parameter is not exchanged: replace parameters before the call, or load without "
            "assign=True"
        )


def require_saved_by(call: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError unless a state was saved by an exchange that the user's call has made, of any model."""
    if _SAVERS[call] in state:
        return
    savers = [saver for saver, entry in _SAVERS.items() if entry in state]
    if savers:
        raise ValueError(
            f"the state was saved by {savers[0]}, but this model uses {call}: use {savers[0]} again, or load model and "
            f"optimizer before {call} is called, which drops the residuals"
        )
    raise ValueError(f"the state is not one that {call} has saved")
