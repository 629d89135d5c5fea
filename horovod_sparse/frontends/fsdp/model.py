"""Parameters of a model that FSDP2 shards, and the checks that sparse exchanges need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from horovod_sparse.frontends.eager import eager

# FSDP's private attributes for a factor of the user's; the second one in torch 2.6.
_FACTORS = ("gradient_divide_factor", "reduce_scatter_reduce_op")
# Entries that only the states of these calls' exchanges have.
_SAVERS = {"sparse_all_reduce": "replica", "sparse_reduce_scatter": "shard"}


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


def units_of(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's private records, each of the parameters that are gathered and reduced together."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            yield from filter(None, [state._fsdp_param_group] if several is None else several)


def before_backward(model: nn.Module, hook: Callable[[torch.Tensor], None]) -> None:
    """Call a hook before FSDP prepares one of its modules for a backward pass.

    FSDP finds the outputs of methods that are registered with ``register_fsdp_forward_method``, too, which call no
    forward hook, and those in data classes.

    Args:
        model: The model.
        hook: Called with the gradient of an output; at least once in each backward pass.
    """
    for state in {module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)}:
        state._pre_backward = _preceded(hook, state._pre_backward)  # type: ignore[method-assign]


def _preceded(hook: Callable[[torch.Tensor], None], prepare: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    @eager
    def both(gradient: torch.Tensor) -> Any:
        hook(gradient)
        return prepare(gradient)

    return both


def require_no_divide_factor(units: Iterable[Any], effect: str, ranks: str) -> None:
    """Check that FSDP averages gradients over the shards.

    Args:
        units: Records of ``units_of``.
        effect: Why a factor of the user's would not have its usual effect, for the message.
        ranks: Number of all ranks, as a term.

    Raises:
        ValueError: It divides them by a factor of the user's.
    """
    for unit in units:
        if any(getattr(unit, name, None) is not None for name in _FACTORS):
            raise ValueError(
                f"set_gradient_divide_factor() would not have the effect that it has {effect}: do not call it, and "
                f"multiply the loss by {ranks} / factor instead"
            )


def require_held(units: Iterable[Any], parameters: Mapping[str, DTensor]) -> None:
    """Check that FSDP shards the same parameters as before; to be called after a forward pass.

    Attributes of the modules do not show it, because they hold the gathered parameters at times.

    Raises:
        ValueError: A parameter was replaced: the hook that exchanges its gradient is on the old one.
    """
    held = {sharded.sharded_param for unit in units for sharded in unit.fsdp_params}
    replaced = [name for name, p in parameters.items() if p not in held]
    if replaced:
        raise ValueError(
            f"{replaced[0]} was replaced after sparse_all_reduce was called, as by load_state_dict(assign=True), and "
            "the gradient of the new parameter is not exchanged: replace parameters before the call, or load without "
            "assign=True"
        )


def require_saved_by(call: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError unless the exchange that a call of the user has made, of any model, has saved a state."""
    if _SAVERS[call] in state:
        return
    savers = [saver for saver, entry in _SAVERS.items() if entry in state]
    if savers:
        raise ValueError(
            f"the state was saved by {savers[0]}, but this model uses {call}: use {savers[0]} again, or load model and "
            f"optimizer before {call} is called, which drops the residuals"
        )
    raise ValueError(f"the state is not one that {call} has saved")
