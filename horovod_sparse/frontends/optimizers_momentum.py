"""Momentum that stays the optimizer's, although a memory applies it before the selection."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from horovod_sparse.engine.delivered import Delivered
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.members import job
from horovod_sparse.frontends.momentum_hooks import MomentumHooks, version_of
from horovod_sparse.frontends.optimizers import buffer_name, coupled_decay, is_gathered, is_known, parameters_in
from horovod_sparse.frontends.shards import shard_of
from horovod_sparse.rules import Mode

if TYPE_CHECKING:
    from horovod_sparse.frontends.exchange import GradientExchange

_LOG = logging.getLogger("horovod_sparse")

_Selected: TypeAlias = Mapping[torch.Tensor, Delivered]


class OptimizersMomentum(MomentumHooks):
    """Lets an optimizer apply its own momentum to effective gradients; see ``Handover``.

    Nesterov's form and Adam's second moment would misread an effective gradient. In a step that sends a selection,
    Nesterov's form is therefore off, as the memory has applied it, and Adam computes its second moment from its first,
    which is the delivered velocity. Where signs are sent, the second moment stays as it is.

    After such a step, the optimizer's buffer holds what was delivered last. Without the state of the exchange, that is
    no momentum to continue from, so the optimizer's ``state_dict()`` holds this rank's velocity instead. The buffer
    itself is part of the state of the exchange, and the next step puts it back.

    Where a script clears buffers between two steps, the momentum begins again, and velocities of the exchange do, too.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._name = buffer_name(optimizer)
        self._hidden: dict[torch.Tensor, torch.Tensor] = {}  # buffers that state_dict() has replaced, to be put back
        self._loaded: dict[torch.Tensor, torch.Tensor] = {}  # buffers of a state of the exchange
        self._changed: list[tuple[dict[str, Any], dict[str, Any]]] = []  # groups, and their settings outside the step
        self._added = 0  # groups added for the step
        self._warned = False
        self._applied: _Selected = {}  # gradients that the step in progress applies
        # Buffers after the last step, with their versions, until the next backward pass.
        self._after_step: dict[torch.Tensor, tuple[torch.Tensor, tuple[int, int] | None]] = {}
        if is_known(optimizer):
            optimizer.register_state_dict_pre_hook(self._show)
            optimizer.register_load_state_dict_post_hook(self._replace)

    # The step

    def _apply(self, optimizer: torch.optim.Optimizer) -> None:
        if self._alone or not is_known(optimizer):
            return
        applied = self._put_back(optimizer)
        for group in list(optimizer.param_groups):
            selected = {p: applied[p] for p in group["params"] if p in applied}
            self._leave_out(optimizer, group, {p: part for p, part in selected.items() if p.grad is None})
            if group.get("nesterov") and group["momentum"]:
                self._turn_nesterov_off(optimizer, group, selected)
            elif "betas" in group:
                self._enter_first_moments(optimizer, group, selected)
        self._applied = applied

    @eager
    def after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note that the step was applied."""
        super().after(optimizer)
        for p, delivered in self._applied.items():
            delivered.commit()
            self._note_buffer(optimizer, p)
        self._applied = {}

    def _note_buffer(self, optimizer: torch.optim.Optimizer, p: torch.Tensor) -> None:
        buffer = self._buffer(optimizer, p)
        if buffer is not None:
            self._after_step[p] = buffer, version_of(buffer)

    def note_changes(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the velocities whose buffers the script has deleted, or filled with zeros, since the last step."""
        changed = {
            p: self._buffer(optimizer, p)
            for p, (buffer, version) in self._after_step.items()
            if self._buffer(optimizer, p) is not buffer or version_of(buffer) != version
        }
        if changed:
            same = {p for p, buffer in changed.items() if buffer is self._after_step[p][0]}
            filled = {p for p, buffer in changed.items() if buffer is not None and bool(shard_of(buffer).any())}
            moved = bool(filled - same)  # such as to the host and back, with zeros where nothing was delivered
            places = self._selected(optimizer)
            for p, buffer in changed.items():
                if p in places and p not in filled and (buffer is None or p in same or not moved):
                    self._hidden.pop(p, None)
                    places[p].drop_momentum()
                elif p in places and p in filled and p in same and not places[p].handover.mode.plain:
                    self._warn_of_change(optimizer)
        self._after_step.clear()

    def _warn_of_change(self, optimizer: torch.optim.Optimizer) -> None:
        """Report once that a script has changed buffers in place."""
        if not (self._warned or job().rank):
            _LOG.warning(
                "rank 0: the script changes the momentum of %s between two steps. It holds only what was delivered "
                "last: what the ranks have not delivered yet does not change with it. Clear the momentum instead, or "
                "load a state of the optimizer, which the exchange follows",
                type(optimizer).__name__,
            )
        self._warned = True

    def take_part(self, optimizer: torch.optim.Optimizer) -> None:
        """Average replaced momentum with the other ranks before a step in which this rank does not take part."""
        for delivered in self._put_back(optimizer).values():
            delivered.commit()

    def _put_back(self, optimizer: torch.optim.Optimizer) -> _Selected:
        """Put back the hidden buffers, and the means of those that were replaced on any rank.

        A collective call after an exchange. Returns what was delivered of each parameter.
        """
        places = self._selected(optimizer)
        replaced = {p for p, delivered in places.items() if delivered.replaced}
        self._put(optimizer, {p: buffer for p, buffer in self._hidden.items() if p not in replaced})
        self._hidden.clear()
        self._loaded.clear()
        for exchange in self.exchanges:
            self._average(optimizer, exchange, {p: one for p, one in exchange.delivered_of.items() if p in replaced})
        return places

    def _average(self, optimizer: torch.optim.Optimizer, exchange: GradientExchange, selected: _Selected) -> None:
        in_order = sorted(selected, key=lambda p: selected[p].key)  # the same on every rank
        sizes = [selected[p].size for p in in_order]
        buffers = [self._buffer(optimizer, p) for p in in_order]
        flat = [
            torch.zeros(size, dtype=torch.float64, device="cpu") if one is None else shard_of(one).flatten()
            for size, one in zip(sizes, buffers, strict=True)
        ]
        if flat:
            means = exchange.average(torch.cat([one.to("cpu", torch.float64) for one in flat]))
            parts = zip(in_order, torch.split(means, sizes), strict=True)
            self._put(optimizer, {p: _like(p, mean) for p, mean in parts})

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        for group, settings in self._changed:
            group.update(settings)
        del optimizer.param_groups[len(optimizer.param_groups) - self._added :]
        self._changed.clear()
        self._added = 0

    def _leave_out(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], selected: _Selected) -> None:
        """Let the buffers of parameters that get no step hold what the exchange expects after a step."""
        for p, delivered in selected.items():
            buffer = self._buffer(optimizer, p)
            change = None if buffer is None or buffer.is_sparse else delivered.change()
            if buffer is not None and change is not None:
                shard = shard_of(buffer)
                shard.add_(change.view(shard.shape).to(shard), alpha=_sign(group) * delivered.unit)

    def _turn_nesterov_off(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], selected: _Selected) -> None:
        """Turn Nesterov's form off for parameters whose velocities were sent; the others get a separate group."""
        velocities: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for p in group["params"]:
            delivered = selected[p] if p in selected and not is_gathered(optimizer, p.grad) else None
            plain = delivered is None or delivered.handover.next_mode.plain
            (others if plain else velocities).append(p)
            buffer = self._buffer(optimizer, p)
            if delivered is not None and delivered.handover.mode.plain != plain and buffer is not None:
                # Over time, Nesterov's form delivers m times as much of the buffer.
                buffer.mul_(1 / group["momentum"] if plain else group["momentum"])
        if velocities:
            self._changed.append((group, {"params": group["params"], "nesterov": True}))
            optimizer.param_groups.append({**group, "params": others})
            self._added += 1
            group.update(params=velocities, nesterov=False)

    def _enter_first_moments(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], selected: _Selected
    ) -> None:
        """Update the first moments early, and pass them as gradients, so that Adam squares them.

        The step itself then leaves the first moments unchanged. The square of an effective gradient would mean nothing:
        it is a difference of velocities with different entries.
        """
        beta, decay, sign = float(group["betas"][0]), coupled_decay(optimizer, group), _sign(group)
        for p, delivered in selected.items():
            first, gradient = self._buffer(optimizer, p), p.grad
            modes = delivered.handover.mode, delivered.handover.next_mode
            if first is None or gradient is None or all(mode.plain for mode in modes):
                continue
            first, gradient, parameter = shard_of(first), shard_of(gradient), shard_of(p)
            if decay:
                gradient.add_(parameter, alpha=decay)
            first.lerp_(gradient if sign > 0 else -gradient, 1 - beta)
            if Mode.SIGNS in modes:
                self._freeze_second_moment(optimizer.state[p], group)
                gradient.zero_()
            else:
                torch.mul(first, sign, out=gradient)
            if decay:
                gradient.sub_(parameter, alpha=decay)

    def _freeze_second_moment(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        """Prepare both moments for a step of Adam with a gradient of zero that leaves them as they are.

        The squares of signs would be the same for all entries of a block. The second moment stays that of the dense
        steps, as in 1-bit Adam, with its bias correction. An entry that has none gets the square of its first moment.
        """
        (factor, other), steps = group["betas"], float(state["step"])
        if not factor:
            raise ValueError(
                f"the first of betas must be above 0, not {factor!r}, where signs of Adam's first moment are sent: set "
                "betas, or memory='residual'"
            )
        first, second = shard_of(state[self._name]), shard_of(state["exp_avg_sq"])
        before, after = 1 - other**steps, 1 - other ** (steps + 1)
        torch.where(second == 0, first.square() * before, second, out=second)
        second.mul_(after / before / other)
        first.div_(factor)

    # The state

    def _show(self, optimizer: torch.optim.Optimizer) -> None:
        """Show this rank's velocities instead of what was delivered last, as the state is about to be returned."""
        self._restore(optimizer)  # in case the last step failed
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        for exchange in self.exchanges:
            if not exchange.between_steps():
                raise RuntimeError(
                    f"rank {job().rank}: the optimizer's state cannot be read during an exchange, which changes "
                    "the momentum: call state_dict() after step()"
                )
            for p, group in groups.items():
                delivered, buffer = exchange.delivered_of.get(p), self._buffer(optimizer, p)
                if delivered is None or delivered.handover.mode.plain or p in self._hidden:
                    continue
                if buffer is None or buffer.is_sparse:
                    continue
                self._hidden[p] = buffer
                optimizer.state[p][self._name] = shown = buffer.clone()
                shard = shard_of(shown)
                owed = delivered.owed(exchange.ranks) * delivered.unit
                shard.add_(owed.view(shard.shape).to(shard), alpha=_sign(group))
                if "betas" in group:
                    _limit(shard, optimizer.state[p], group)
                if p in self._after_step:
                    self._note_buffer(optimizer, p)

    def _replace(self, optimizer: torch.optim.Optimizer) -> None:
        """Continue with the momentum of a loaded optimizer state, unless a state of the exchange was loaded, too."""
        self._hidden.clear()
        self._after_step.clear()
        self._put(optimizer, self._loaded)
        for exchange in self.exchanges:
            exchange.undo_if_undoable()
        for delivered in self._selected(optimizer).values():
            delivered.replace_momentum()

    def buffers(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
        """Return the buffers that belong to the state of the exchange."""
        found = {}
        for p in self._selected(optimizer):
            buffer = self._hidden.get(p, self._buffer(optimizer, p))
            if buffer is not None and not buffer.is_sparse:
                found[p] = shard_of(buffer)
        return found

    def load(self, optimizer: torch.optim.Optimizer, buffers: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Load buffers of a state of the exchange; the optimizer's state may be loaded before or after."""
        for p, buffer in buffers.items():
            self._hidden.pop(p, None)
            self._after_step.pop(p, None)
            self._loaded[p] = _like(p, buffer)
        self._put(optimizer, self._loaded)

    def _put(self, optimizer: torch.optim.Optimizer, buffers: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for p, buffer in buffers.items():
            if self._name in optimizer.state.get(p, {}) or self._name == "momentum_buffer":
                optimizer.state[p][self._name] = buffer

    def _buffer(self, optimizer: torch.optim.Optimizer, p: torch.Tensor) -> torch.Tensor | None:
        buffer: torch.Tensor | None = optimizer.state.get(p, {}).get(self._name)
        return buffer

    def _selected(self, optimizer: torch.optim.Optimizer) -> _Selected:
        places = {p: delivered for exchange in self.exchanges for p, delivered in exchange.delivered_of.items()}
        return {p: places[p] for p in parameters_in(optimizer) if p in places}


def _sign(group: Mapping[str, Any]) -> int:
    """Return the sign with which gradients enter the buffer."""
    return -1 if group.get("maximize") else 1


def _limit(first: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Limit first moments to those with which Adam's steps are no longer than the learning rate.

    Velocities have entries that were not delivered yet, whose second moments are zero.
    """
    steps = float(state["step"])
    beta, other = (1 - beta**steps for beta in group["betas"])
    limit = (shard_of(state["exp_avg_sq"]) / other).sqrt_().mul_(beta)
    first.clamp_(-limit, limit)


def _like(p: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return a copy in shape, dtype and memory format of a parameter, of which this rank may hold a shard."""
    copy = torch.empty_like(p, requires_grad=False)
    shard = shard_of(copy)
    shard.copy_(content.view(shard.shape))
    return copy
