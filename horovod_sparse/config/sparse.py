"""Configuration of the exchange as one frozen dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar

from horovod_sparse.collectives import COLLECTIVES, Collective, Dense, ReduceScatter, TopkA
from horovod_sparse.memories import MEMORIES, Memory, NoMemory, Residual
from horovod_sparse.rules import ANYWHERE, BucketContext, Mode
from horovod_sparse.rules.options import RuleOptions, integer, number
from horovod_sparse.rules.registry import Registry, lookup
from horovod_sparse.schedules import SCHEDULES, Constant, Schedule
from horovod_sparse.sparsifiers import SPARSIFIERS, Sparsifier, TopK

_KINDS = {rules.kind: rules for rules in (SPARSIFIERS, MEMORIES, COLLECTIVES, SCHEDULES)}
_Rule = TypeVar("_Rule", bound=type)


def register(kind: str, name: str) -> Callable[[_Rule], _Rule]:
    """Register a custom rule under a name that ``Sparse.of``, the presets and ``parse`` then accept.

    Use it as a class decorator, which returns the class unchanged::

        @hvs.register("sparsifier", "mine")
        class Mine: ...

    Every rank must register the same rules before it creates a configuration, which importing their module does. A
    class with the module and name of an earlier one replaces it, so that modules can be reloaded.

    Args:
        kind: "sparsifier", "memory", "collective" or "schedule".
        name: An identifier that no rule of this kind has.

    Raises:
        ValueError: The kind is unknown, the name is not an identifier or already used, or the class lacks a part of its
            protocol (``Sparsifier``, ``Memory``, ``Collective`` or ``Schedule``).
    """
    rules: Registry = lookup("kind of rule", kind, _KINDS)
    return rules.register(name)


@dataclass(frozen=True)
class Sparse(RuleOptions):
    """Configuration of a sparse exchange; must be the same on every rank.

    Usually created by a preset of ``Compression``, by ``parse`` or by ``Sparse.of``, which take names and settings.

    Args:
        density: Fraction of a bucket's gradients that a rank sends in each step, in (0, 1]. Schedules may vary it.
        sparsifier: Options of the rule that selects the entries to send.
        memory: Options of the rule that keeps the entries that are not sent.
        collective: Options of the sparse allreduce.
        schedule: Options of the rule that sets the density over time.
        dense_below: Parameters with fewer elements are sent dense, in shared buckets: compression would save little
            there, and cost much.
        bucket_bytes: Maximum size of a bucket in bytes, except for a single larger gradient. Larger buckets need fewer
            messages; smaller ones overlap more of the exchange with the backward pass. None: 25 MiB if a fraction is
            sent; if everything is sent, an eighth of the model, between 1 and 25 MiB.

    Raises:
        ValueError: A value is out of range, or two rules cannot be combined.
    """

    density: float = number(MISSING, above=0, most=1, hint="0.01 sends 1 % of the gradients")
    sparsifier: RuleOptions = field(default_factory=TopK.Options)
    memory: RuleOptions = field(default_factory=Residual.Options)
    collective: RuleOptions = field(default_factory=TopkA.Options)
    schedule: RuleOptions = field(default_factory=Constant.Options)
    dense_below: int = integer(1024)
    bucket_bytes: int | None = integer(None, least=1)

    @classmethod
    def of(
        cls,
        density: float,
        sparsifier: str = "topk",
        memory: str = "residual",
        collective: str = "topka",
        schedule: str = "constant",
        **settings: Any,
    ) -> Sparse:
        """Return a configuration from the names of its rules.

        Args:
            density: Fraction of a bucket's gradients that a rank sends in each step, in (0, 1].
            sparsifier: A key of ``SPARSIFIERS``.
            memory: A key of ``MEMORIES``.
            collective: A key of ``COLLECTIVES``.
            schedule: A key of ``SCHEDULES``.
            **settings: ``dense_below``, ``bucket_bytes``, and options of the four rules. An option that two rules have,
                such as ``tau_threshold`` of Ok-Topk and its sparsifier, applies to both.

        Raises:
            ValueError: A name or an option is unknown, or a value is out of range.
        """
        names = {"sparsifier": sparsifier, "memory": memory, "collective": collective, "schedule": schedule}
        rules = {kind: _KINDS[kind].find(name).Options.read(settings) for kind, name in names.items()}
        own = {name: settings[name] for name in ("dense_below", "bucket_bytes") if name in settings}
        known = {"dense_below", "bucket_bytes"}.union(*(options.known() for options in rules.values()))
        for name in settings:
            lookup("option", name, dict.fromkeys(sorted(known)), _owners(name))
        return cls(density, **rules, **own)

    def __post_init__(self) -> None:
        """Check everything that needs neither a communicator nor a model."""
        super().__post_init__()
        for kind in _KINDS:
            self._name(kind)
        anywhere = replace(ANYWHERE, shared={})  # what configurations share must not survive this check
        sparsifier, schedule = self._make("sparsifier", anywhere), self._make("schedule", anywhere, self.density)
        name = self._name("sparsifier")
        if self.collective.shared_indices and not sparsifier.shares_indices:
            raise ValueError(
                f"collective 'shared' sends values without indices, but the sparsifier {name!r} chooses "
                "different indices on each rank: use randomblock, randomk, stable or arctopk"
            )
        if schedule.weighs and not sparsifier.narrows:
            raise ValueError(
                f"schedule {self._name('schedule')!r} sends a part of what was selected, but the sparsifier {name!r} "
                "selects the same positions on all ranks, and they would send different parts of them: use another "
                "sparsifier, such as topk or randomk"
            )
        for kind in _KINDS:
            if reason := getattr(self, kind).conflict(self.sparsifier, self.collective):
                others = " and ".join(f"{rule} {self._name(rule)!r}" for rule in ("sparsifier", "collective"))
                raise ValueError(f"{kind} {self._name(kind)!r} does not work with {others}: {reason}")

    def k(self, size: int, density: float | None = None) -> int:
        """Return the number of entries to send out of ``size``: round(density * size), at least 1 unless size is 0.

        The density is that of the step; None: the configured one.
        """
        return min(size, max(1, round((self.density if density is None else density) * size)))

    @property
    def mode(self) -> Mode:
        """Mode after the dense steps at the start, unless schedule or collective decide to send everything."""
        return self.collective.mode

    @property
    def replaces_momentum(self) -> bool:
        """True if the memory applies momentum before the selection, the optimizer's or its own."""
        return bool(self._rule("memory").replaces_momentum)

    @property
    def takes_momentum_over(self) -> bool:
        """True if the memory applies the optimizer's momentum. With a configured one, the optimizer must have none."""
        return self.momentum is not None and self.momentum.own is None

    @property
    def momentum(self) -> Any:
        """Options of the momentum that the memory applies, as in ``MomentumCorrection``; None: it applies none."""
        return self.memory if self.replaces_momentum else None

    def build(self, context: BucketContext, transport: Any) -> tuple[Memory, Sparsifier, Collective, Schedule]:
        """Build the four rules of one bucket.

        The collective comes first: other ranks may wait in its constructor, and the rest may fail on one rank alone.

        Raises:
            ValueError: An option does not fit a bucket of this size.
        """
        if context.scatters:
            collective: Any = ReduceScatter(context, transport, self.collective)
        else:
            collective = self._make("collective", context, transport)
        memory, sparsifier = self._make("memory", context), self._make("sparsifier", context)
        return memory, sparsifier, collective, self._make("schedule", context, self.density)

    def without_memory(self, context: BucketContext) -> Memory:
        """Build a memory that keeps nothing, for steps in which the configured one pauses."""
        return NoMemory(context, NoMemory.Options())

    @property
    def wire_of_all(self) -> str | None:
        """Format to which the collective rounds everything; None: it selects, or does not round."""
        return None if self.mode is Mode.SELECT else getattr(self.collective, "wire", None)

    @property
    def dense_steps(self) -> int:
        """Number of steps at the start in which everything is sent and nothing is rounded."""
        return getattr(self.schedule, "dense_steps", 0)

    def rounded(self, wire: str | None, context: BucketContext, transport: Any) -> Collective:
        """Build the collective of dense steps in which values are rounded to a format; None: not rounded."""
        return Dense(context, transport, Dense.Options(wire=wire))

    def facts(self) -> dict[str, Any]:
        """Return everything that can change a result, as plain values; equal for equal configurations.

        Raises:
            ValueError: A rule is not registered in this process, for example because the configuration was created in
                another one.
        """
        facts: dict[str, Any] = _plain(self)
        for kind in _KINDS:
            facts[kind]["of"] = self._name(kind)
        return facts

    def _make(self, kind: str, *arguments: Any) -> Any:
        return self._rule(kind)(*arguments, getattr(self, kind))

    def _rule(self, kind: str) -> Any:
        return _KINDS[kind][self._name(kind)]

    def _name(self, kind: str) -> str:
        return _KINDS[kind].name_of(getattr(self, kind))


def _owners(option: str) -> str:
    """Return a hint to the rules that have an option; empty if none has."""
    found = [
        f"{kind}={name!r}"
        for kind, rules in _KINDS.items()
        for name, rule in rules.items()
        if option in {known.name for known in fields(rule.Options)}
    ]
    return f"; {option!r} is an option of {' or '.join(found)}, which is not chosen here" if found else ""


def _plain(value: Any) -> Any:
    if isinstance(value, RuleOptions):
        facts = {option.name: _plain(getattr(value, option.name)) for option in fields(value) if option.compare}
        return {"of": type(value).__qualname__, **facts}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
