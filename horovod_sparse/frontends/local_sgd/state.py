"""State of local steps: entries of the optimizer's state that all ranks have in common, and each rank's own part."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.engine.exchange import require_state
from horovod_sparse.engine.state import on_host
from horovod_sparse.frontends.local_sgd.fragment import Fragment, Transfer
from horovod_sparse.frontends.local_sgd.rounds import Rounds
from horovod_sparse.frontends.optimizers import parameters_in
from horovod_sparse.frontends.registry import local_states
from horovod_sparse.frontends.reshard import Part, merge_replicas
from horovod_sparse.frontends.shards import shard_of, with_shard
from horovod_sparse.kernels import copy_to_host
from horovod_sparse.rules import Momentum

# Keys in the optimizer's state of a parameter, which broadcasts and checkpoints include.
_COMMON, _VELOCITY = "common_parameter", "outer_momentum"
# Key in each param group: local steps in the current round; broadcasts include it, too.
_LOCAL_STEP = "local_step"


def plain(optimizer: Any) -> Any:
    """Return the optimizer with the functions of the user's class, without the overrides of ``LocalOptimizer``."""
    return super(type(optimizer), optimizer)


class LocalState:
    """Entries that a ``LocalOptimizer`` adds to the states of its optimizer, and this rank's part of a checkpoint.

    Args:
        optimizer: The ``LocalOptimizer``; held weakly.
        rounds: The rounds.
        momentum: Whether the outer step has momentum.
        grad_scaler: The scaler of this rank, saved with its state.

    Attributes:
        has_state: Whether the optimizer has a state; the state of a new one must look empty.
    """

    def __init__(
        self,
        optimizer: Any,
        rounds: Rounds,
        momentum: bool,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.has_state = False
        self._optimizer = weakref.ref(optimizer)
        self._rounds = rounds
        self._momentum = momentum
        self._grad_scaler = grad_scaler
        # Whether the next step begins from the common parameters: a loaded state has only the saving rank's own ones.
        self._begins_from_common = False
        self.copy_local_step()
        local_states.add(self)

    @property
    def _own(self) -> Any:
        return self._optimizer()

    @property
    def _plain(self) -> Any:
        return plain(self._own)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._own.param_groups
        return groups

    @property
    def compression(self) -> Any:
        """The configuration."""
        return self._rounds.compression

    @property
    def fragments(self) -> list[Fragment]:
        """The fragments."""
        return self._rounds.fragments

    @property
    def local_step(self) -> int:
        """Number of steps in the current round, including those that a GradScaler skipped."""
        return int(self._groups[0].get(_LOCAL_STEP, 0))

    @local_step.setter
    def local_step(self, steps: int) -> None:
        for group in self._groups:
            group[_LOCAL_STEP] = steps

    def copy_local_step(self) -> None:
        """Write the number of steps in the round into all param groups, of which some may be new."""
        self.local_step = self.local_step

    def apart_in(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the model's parameters that may differ between ranks."""
        own = set(model.parameters()) if self._own is not None else set()
        return [name for p, name, fragment in self._rounds.parameters() if p in fragment.apart and p in own]

    @property
    def begun(self) -> int:
        """Number of fragments whose exchange has begun in this round.

        It follows from ``local_step`` alone, which Horovod's broadcasts set on other ranks than the one that loads.
        """
        return self._rounds.schedule.due(self.local_step, self._own.local_steps)

    def note_state(self, *_: object) -> None:
        """Note a step of the user's class, including the one with which Horovod initializes state."""
        self.has_state = True

    def begin(self) -> None:
        """Prepare a step or an exchange: begin from the common parameters if the state of another rank was loaded."""
        if self._begins_from_common:
            self._restart()

    @torch.no_grad()
    def _restart(self) -> None:
        for p, _, fragment in self._rounds.parameters():
            if p in fragment.apart:
                shard_of(p.detach()).copy_(fragment.common[p])
        for fragment in self.fragments:
            fragment.mark_common()
        self.local_step = 0
        self._begins_from_common = False

    def add_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add the common parameters and the outer momentum to an optimizer's ``state_dict``.

        If a load of it begins from the common parameters, it begins a round. Torch's dictionaries of the parameters are
        no copies, and must not be: Horovod's broadcast_optimizer_state writes into them.
        """
        if self._rounds.schedule.keeps_own:
            for group in state["param_groups"]:
                group[_LOCAL_STEP] = 0
        self._rounds.settle()
        index = {p: number for number, p in enumerate(parameters_in(self._own))}
        for p, _, fragment in self._rounds.parameters():
            if self.has_state and (p.requires_grad or p in fragment.common or p in fragment.velocity):
                entry = state["state"].setdefault(index[p], {})
                common = fragment.common[p] if p in fragment.apart else shard_of(p.detach())
                entry[_COMMON] = with_shard(p.detach(), common)
                if self._momentum:
                    entry[_VELOCITY] = with_shard(p.detach(), fragment.velocity_of(p))
        return state

    def take_from(self, state: dict[torch.Tensor, Any]) -> None:
        """Move what ``add_to`` has added out of the loaded state of an optimizer."""
        self.has_state, schedule = True, self._rounds.schedule
        moved = self.local_step > 0 or schedule.needs_synchronize
        self._rounds.settle()
        for fragment in self.fragments:
            fragment.mark_common()
            fragment.stepped = moved
        for p, _, fragment in self._rounds.parameters():
            entry = state.get(p, {})
            common, velocity = entry.pop(_COMMON, None), entry.pop(_VELOCITY, None)
            fragment.velocity.pop(p, None)  # of what was trained before loading
            if velocity is not None:
                fragment.velocity[p] = shard_of(velocity).clone()  # torch loads tensors without a copy
            if common is not None and moved:
                fragment.take_common(p, shard_of(common).clone())  # state_dict() may have returned the parameter itself
            if p in state and not entry:
                del state[p]
        self._begins_from_common = schedule.keeps_own

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Return copies of this rank's residuals, and of its parameters and optimizer after the local steps.

        To be called after the same step on every rank, as it waits for what is in flight.

        Args:
            copy: Copies an array of the exchange to the host.

        Raises:
            RuntimeError: An exchange has failed.
        """
        self.begin()
        self._rounds.settle()
        for fragment in self.fragments:
            fragment.exchange.require_intact()
        own = self._plain.state_dict()
        entries = {
            at: {
                key: shard_of(value) if isinstance(value, torch.Tensor) else value
                for key, value in entry.items()
                if key not in (_COMMON, _VELOCITY)  # add_to has written them into torch's own dictionaries
            }
            for at, entry in own["state"].items()
        }
        return {
            **self._exchanged(copy),
            "local_step": self.local_step,
            "fragments": [self._of_fragment(fragment) for fragment in self.fragments],
            "optimizer": on_host({**own, "state": entries}),
            "scaler": None if self._grad_scaler is None else self._grad_scaler.state_dict(),
        }

    def _exchanged(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Return the part of the state that other numbers of ranks can take over."""
        buckets = [one for fragment in self.fragments for one in fragment.exchange.state_dict(copy)["buckets"]]
        return {**self._part.facts(), "buckets": buckets} if self._sharded else {"buckets": buckets}

    @property
    def _sharded(self) -> bool:
        return any(hasattr(p, "to_local") for p in parameters_in(self._own))

    @property
    def _part(self) -> Part:
        named = {name: p for p, name in self._rounds.names.items()}
        return Part.of(self.fragments[0].exchange.transport, named)

    def _of_fragment(self, fragment: Fragment) -> dict[str, Any]:
        names, transfer = fragment.names, fragment.transfer
        flying = {} if transfer is None else {names[p]: transfer.starts[p] for p in transfer.moving}
        state = {
            "stepped": fragment.stepped,
            "parameters": {names[p]: shard_of(p.detach()) for p in names if p in fragment.apart},
            "base": {names[p]: base for p, base in fragment.base.items()},
            "left": 0 if transfer is None else transfer.left,
            "starts": flying,
        }
        return dict(on_host(state))

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on the same rank of the same world size.

        Load the model's and the optimizer's ``state_dict`` first, both of rank 0. A state from ``merge``, or from an
        optimizer that exchanges gradients, only has residuals: the round then starts again from the common parameters.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration.
        """
        require_state(state)
        if self._sharded:
            self._part.require(state)
        saved = len(state.get("fragments", self.fragments))
        if saved != len(self.fragments):
            raise ValueError(
                f"the state was saved with fragments={saved}, not {len(self.fragments)}: load it with these"
            )
        for fragment, buckets in zip(self.fragments, self._divide(state), strict=True):
            fragment.exchange.load_state_dict({"buckets": buckets})
        self._restart()  # the model has loaded what rank 0 had moved to
        if "optimizer" not in state:
            return
        self._load_optimizer(state["optimizer"])  # with the place in the round
        for fragment, saved_one in zip(self.fragments, state["fragments"], strict=True):
            self._load_fragment(fragment, saved_one)
        if self._grad_scaler is not None and state["scaler"] is not None:
            self._grad_scaler.load_state_dict(state["scaler"])

    def _load_fragment(self, fragment: Fragment, saved: Mapping[str, Any]) -> None:
        named = {name: p for p, name in fragment.names.items()}
        for name, values in saved["parameters"].items():
            fragment.save(named[name])
            shard_of(named[name].detach()).copy_(values)
        fragment.base.update((named[name], values.to(named[name].device)) for name, values in saved["base"].items())
        fragment.stepped = saved["stepped"]
        if saved["starts"]:
            starts = {named[name]: values.to(named[name].device) for name, values in saved["starts"].items()}
            fragment.transfer = Transfer(saved["left"], starts, moving=list(starts))

    def _load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Load this rank's state; that of sharded parameters is sharded as the one that was loaded before it."""
        loaded = self._plain.state_dict()["state"]
        state = {
            at: {key: _like(loaded.get(at, {}).get(key), value) for key, value in entry.items()}
            for at, entry in saved["state"].items()
        }
        self._plain.load_state_dict({**saved, "state": state})

    def _divide(self, state: Mapping[str, Any]) -> list[list[Any]]:
        """Return the buckets of a state by the fragments that hold their parameters; unknown ones in the first."""
        number_of = {name: n for n, fragment in enumerate(self.fragments) for name in fragment.names.values()}
        divided: list[list[Any]] = [[] for _ in self.fragments]
        for bucket in state["buckets"]:
            divided[number_of.get(bucket["parameters"][0], 0)].append(bucket)
        return divided

    def merge(
        self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size; a collective call.

        Args:
            states: States that this rank takes over; of sharded parameters, those of all ranks, in any order.
            leader: The state of the old rank 0; None: parameters are sharded.
        """
        if leader is not None:
            merged, notes = self._merge(states, leader)
        else:
            by_replica: dict[int, list[Mapping[str, Any]]] = {}
            for state in states:
                by_replica.setdefault(state["replica"], []).append(state)
            elementwise = self.compression.memory.elementwise
            merged, notes = merge_replicas(
                by_replica, self._exchanged(), elementwise, self._merge, lambda _: Momentum()
            )
        first = leader if leader is not None else by_replica[0][0]
        notes.append("all ranks continue with the optimizer of rank 0")
        if first.get("local_step"):
            notes.append(f"the round in progress starts over: its {first['local_step']} steps are dropped")
        elif self._rounds.schedule.needs_synchronize:
            notes.append("the steps since the last exchange of each fragment are dropped")
        return merged, notes

    def _merge(
        self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        divided, leaders = [self._divide(state) for state in states], self._divide(leader)
        buckets, notes = [], []
        for number, fragment in enumerate(self.fragments):
            own = [{"buckets": one[number]} for one in divided]
            merged, more = fragment.exchange.merge(own, {"buckets": leaders[number]})
            buckets += merged["buckets"]
            notes += more
        return {"buckets": buckets}, list(dict.fromkeys(notes))


def _like(loaded: Any, value: Any) -> Any:
    """Return a value, sharded as the one that it replaces."""
    return with_shard(loaded, value.to(loaded.device)) if hasattr(loaded, "to_local") else value
