"""Local-SGD rounds: diverge from shared parameters, then average."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod_sparse.config import Sparse
from horovod_sparse.control.lifecycle import process
from horovod_sparse.control.report import Limits
from horovod_sparse.engine.exchange import Exchange
from horovod_sparse.engine.layout import Member
from horovod_sparse.engine.state import on_host
from horovod_sparse.frontends.local_sgd.outer import OuterSGD
from horovod_sparse.kernels import copy_to_host
from horovod_sparse.transport.agreement import agree
from horovod_sparse.transport.base import Transport

# Keys in the optimizer's state of a parameter, which broadcasts and checkpoints include.
_COMMON, _VELOCITY = "common_parameter", "outer_momentum"
# Key in each param group: local steps in the current round; broadcasts include it, too.
_LOCAL_STEP = "local_step"


def plain(optimizer: Any) -> Any:
    """Return the optimizer with the functions of the user's class, without the overrides of ``LocalOptimizer``."""
    return super(type(optimizer), optimizer)


class Rounds:
    """Rounds of one optimizer, and the exchange that ends them.

    In a round, ranks step independently. It ends with an outer step from the common parameters theta that it started
    with. The gradient of this step is the mean of C(theta - theta_local), where C is the compression with its memory.
    Differences of parameters are updates, so their residuals do not follow the learning rate.

    Args:
        optimizer: The optimizer that takes the local steps; held weakly.
        names: Names of the optimizer's parameters.
        sparse: The configuration.
        transport: Transport of the ranks that take part.
        outer: Settings of the outer step.
        stall: Limits of the wait for a bucket.
        grad_scaler: The scaler of this rank, saved with its state.

    Attributes:
        exchange: Exchange of the differences, with their residuals.
        stepped: Whether this rank has taken a step in this round.
        begun: Whether the optimizer has a state; the state of a new one must look empty.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        sparse: Sparse,
        transport: Transport,
        outer: OuterSGD,
        stall: Limits,
        grad_scaler: torch.amp.GradScaler | None,
    ) -> None:
        me = weakref.proxy(self)
        self.exchange = Exchange(sparse, transport, 1 / transport.size, stall, admit=lambda keys: me._admit_named(keys))
        self.stepped = False
        self.begun = False
        self._optimizer = weakref.ref(optimizer)
        self._names: dict[torch.Tensor, str] = {}
        self._outer = outer
        self._grad_scaler = grad_scaler
        self._common: dict[torch.Tensor, torch.Tensor] = {}
        self._velocity: dict[torch.Tensor, torch.Tensor] = {}
        self._apart: set[torch.Tensor] = set()  # parameters that may differ between ranks in this round
        self._compared = False  # whether the ranks have compared the initial parameters of the first round
        self.admit(names)

    @property
    def compression(self) -> Sparse:
        """The configuration."""
        return self.exchange.compression

    @property
    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.param_groups

    @property
    def local_step(self) -> int:
        """Number of steps in the current round, including those that a GradScaler skipped."""
        return int(self._groups[0].get(_LOCAL_STEP, 0))

    @local_step.setter
    def local_step(self, steps: int) -> None:
        for group in self._groups:
            group[_LOCAL_STEP] = steps

    def admit(self, names: Mapping[torch.Tensor, str]) -> None:
        """Add parameters, the same on every rank; a collective call."""
        named = {name: p for p, name in names.items() if p.numel()}
        in_order = {named[name]: name for name in self.exchange.order(list(named))}
        self._names |= in_order
        self.local_step = self.local_step  # in new param groups, too
        self._place(p for p in in_order if p.requires_grad)

    def _place(self, parameters: Iterable[torch.Tensor]) -> None:
        """Create buckets for parameters; a collective call."""
        least = self.compression.dense_below
        members = [Member.of(self._names[p], p, -1, least=least) for p in parameters]
        if members:
            self.exchange.add(members)

    def _admit_named(self, keys: Sequence[str]) -> None:
        """Create a bucket for parameters that were trained before a checkpoint; a collective call."""
        named = {name: p for p, name in self._names.items()}
        self._place(named[key] for key in reversed(keys) if key in named)

    def begin(self) -> None:
        """Save the common parameters; to be called before each step."""
        for p in self._names:
            if p.requires_grad and p not in self._apart:
                self._save(p)

    def note_begun(self, *_: object) -> None:
        """Note a step of the user's class, including the one with which Horovod initializes state."""
        self.begun = True

    def _save(self, p: torch.Tensor) -> None:
        values = p.detach()
        self._common[p] = self._common[p].copy_(values) if p in self._common else values.clone()
        self._apart.add(p)

    @torch.no_grad()
    def end(self, working: bool = True) -> bool:
        """End the round; parameters then have the same bits on every rank. A collective call.

        Nothing is exchanged if no rank has taken a step.

        Args:
            working: Whether this rank will take further steps.

        Returns:
            Whether any rank will take further steps, or has taken one in this round.
        """
        mine = [working, self.stepped, *(p.requires_grad or p in self._apart for p in self._names)]
        works, gives, *moving = self.exchange.anywhere(mine)
        if gives:
            self._step([p for p, moves in zip(self._names, moving, strict=True) if moves])
        self._reset()
        return works or gives

    def _reset(self) -> None:
        self._apart.clear()
        self.stepped, self.local_step = False, 0

    def _step(self, moving: Sequence[torch.Tensor]) -> None:
        """Exchange how far the ranks have moved, and take the outer step.

        Args:
            moving: Parameters that were trained in this round on any rank; others are unchanged.
        """
        # Parameters that are frozen on this rank keep their residuals until they are trained again.
        held = {p for p in self._names if not p.requires_grad and p not in self._apart}
        for p in moving:
            if p not in self._apart:
                self._save(p)
        self._compare(moving)
        if self.exchange.ranks > 1:
            self._place(p for p in moving if self._names[p] not in self.exchange.worker)
        try:
            # Written into the parameters, whose values are no longer needed.
            differences = {p: torch.sub(self._common[p], p, out=p.detach()) for p in moving}
            self._average(differences, held)
            common = [self._common[p] for p in moving]
            self._outer.apply(common, list(differences.values()), [self._velocity_of(p) for p in moving])
        finally:
            for p in moving:
                p.copy_(self._common[p])

    def _average(self, differences: Mapping[torch.Tensor, torch.Tensor], held: Container[torch.Tensor]) -> None:
        """Replace differences by the mean over the ranks of what is sent."""
        self.exchange.idle = not self.stepped
        worker, named = self.exchange.worker, {name: p for p, name in self._names.items()}
        with worker.completing():
            for key in worker.keys:
                p = named[key]
                difference = differences[p] if p in differences else torch.zeros_like(p)
                worker.put(key, difference, hold=p in held)
            worker.collect()

    def _velocity_of(self, p: torch.Tensor) -> torch.Tensor:
        if p not in self._velocity:
            self._velocity[p] = torch.zeros_like(p)
        return self._velocity[p]

    def _compare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Check once that all ranks started with the same parameters; otherwise they would never become equal."""
        if not self._compared:
            start = tuple((self._names[p], _digest(self._common[p])) for p in parameters)
            with process.communicating("synchronize()", self.exchange.transport):
                what = "start of the first round, which hvd.broadcast_parameters() makes common,"
                agree(self.exchange.transport, {what: start})
            self._compared = True

    def join(self) -> Callable[[], None]:
        """Participate in the other ranks' rounds until no rank takes further steps; for ``hvd.join()``.

        Returns:
            A function that waits for the end.
        """

        def take_part() -> None:
            try:
                while self.end(working=False):
                    pass
            except BaseException as error:
                process.abort(f"failed in the other ranks' rounds while it was in hvd.join(): {error!r}")

        thread = process.background("horovod_sparse_join")
        future = thread.submit(take_part)

        def wait() -> None:
            future.result()
            thread.close()

        return wait

    def add_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """Add the common parameters and the outer momentum to an optimizer's ``state_dict``."""
        parameters = [p for group in self._groups for p in group["params"]]
        for index, p in enumerate(parameters):
            if self.begun and p in self._names and (p.requires_grad or p in self._common or p in self._velocity):
                entry = state["state"].setdefault(index, {})
                entry[_COMMON] = self._common[p] if p in self._apart else p.detach()
                if self._outer.momentum:
                    entry[_VELOCITY] = self._velocity_of(p)
        return state

    def take_from(self, state: dict[torch.Tensor, Any]) -> None:
        """Move what ``add_to`` has added out of the loaded state of an optimizer."""
        self.begun, self.stepped = True, self.local_step > 0
        self._apart.clear()
        for p in self._names:
            entry = state.get(p, {})
            common, velocity = entry.pop(_COMMON, None), entry.pop(_VELOCITY, None)
            self._velocity.pop(p, None)  # of what was trained before loading
            if velocity is not None:
                self._velocity[p] = velocity
            if common is not None and self.stepped:
                self._common[p] = common
                self._apart.add(p)
            if p in state and not entry:
                del state[p]

    def state_dict(self, copy: Callable[[Any], Any] = copy_to_host) -> dict[str, Any]:
        """Return copies of this rank's residuals, and of its parameters and optimizer after the local steps.

        Args:
            copy: Copies an array of the exchange to the host.
        """
        own = plain(self._optimizer()).state_dict()
        ours = (_COMMON, _VELOCITY)
        entries = {at: {key: entry[key] for key in entry if key not in ours} for at, entry in own["state"].items()}
        return {
            **self.exchange.state_dict(copy),
            "local_step": self.local_step,
            "stepped": self.stepped,
            "parameters": on_host({self._names[p]: p for p in self._names if p in self._apart}),
            "optimizer": on_host({**own, "state": entries}),
            "scaler": None if self._grad_scaler is None else self._grad_scaler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on the same rank of the same world size.

        Load the model's and the optimizer's ``state_dict`` first, both of rank 0. A state from ``merge``, or from an
        optimizer that exchanges gradients, only has residuals: the round then starts again from the common parameters.

        Raises:
            ValueError: The state belongs to another model, bucket size or configuration.
        """
        self.exchange.load_state_dict(state)
        for p in self._apart:  # on rank 0, whose values the model has loaded
            p.copy_(self._common[p])
        if "optimizer" not in state:
            self._reset()
            return
        self._apart.clear()
        plain(self._optimizer()).load_state_dict(state["optimizer"])
        named = {name: p for p, name in self._names.items()}
        for name, values in state["parameters"].items():
            self._save(named[name])
            named[name].copy_(values)
        self.stepped = state["stepped"]
        if self._grad_scaler is not None and state["scaler"] is not None:
            self._grad_scaler.load_state_dict(state["scaler"])

    def merge(self, states: Sequence[Mapping[str, Any]], leader: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the state that continues those of another world size, as ``Exchange.merge``; a collective call."""
        merged, notes = self.exchange.merge(states, leader)
        notes.append("all ranks continue with the optimizer of rank 0")
        if leader.get("local_step"):
            notes.append(f"the round in progress starts over: its {leader['local_step']} steps are dropped")
        return merged, notes


def _digest(tensor: torch.Tensor) -> str:
    bits = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]
