"""Configuration of the exchange: one frozen dataclass, its presets and its text form."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from horovod_sparse.collectives import COLLECTIVES, Collective, Dense, SharedIndices, TopkA
from horovod_sparse.memories import MEMORIES, Memory, NoMemory, Residual
from horovod_sparse.memories.compressed import CompressedOptions
from horovod_sparse.rules import ANYWHERE, Place
from horovod_sparse.rules.options import RuleOptions, is_number, number, whole
from horovod_sparse.rules.registry import Registry
from horovod_sparse.schedules import SCHEDULES, Constant, Schedule
from horovod_sparse.sparsifiers import SPARSIFIERS, RandomBlock, RandomK, Sparsifier, TopK

_KINDS = {rules.kind: rules for rules in (SPARSIFIERS, MEMORIES, COLLECTIVES, SCHEDULES)}
_Rule = TypeVar("_Rule", bound=type)


def register(kind: str, name: str) -> Callable[[_Rule], _Rule]:
    """Gives a rule of your own a name, by which ``Sparse.of``, the presets and ``parse`` know it from then on.

    A decorator of the class::

        @hvs.register("sparsifier", "mine")
        class Mine: ...

    Every rank registers the same rules, before it makes a configuration; to import their module does it. A class of
    the same module and name takes the place of the one before, as when a module is loaded anew.

    Args:
        kind: "sparsifier", "memory", "collective" or "schedule".
        name: An identifier that no rule of this kind has.

    Returns:
        A function that takes the class and gives it back.

    Raises:
        ValueError: The kind is unknown, the name is none or taken, or the class lacks something that its protocol
            (``Sparsifier``, ``Memory``, ``Collective``, ``Schedule``) asks for.
    """
    rules: Registry = _lookup("kind of rule", kind, _KINDS)
    return rules.register(name)


@dataclass(frozen=True)
class Sparse(RuleOptions):
    """Configuration of a sparse exchange; every rank must use the same.

    Usually made by a preset of ``Compression``, by ``parse``, or by ``Sparse.of``, which take names and settings.

    Args:
        density: Fraction of a bucket's gradients that a rank sends each step, in (0, 1]. What exactly it means is up
            to the schedule.
        sparsifier: Options of the rule that chooses them.
        memory: Options of the rule for what is not sent.
        collective: Options of the sparse allreduce.
        schedule: Options of the rule by which the density changes over time.
        dense_below: Parameters with fewer elements travel dense, together: little to save, much to lose.
        bucket_bytes: Gradients travel together up to this size. Larger buckets cost fewer messages, smaller ones
            overlap more of the exchange with the backward pass.

    Raises:
        ValueError: A value is out of range, or two parts do not go together.
    """

    density: float = number(MISSING, lambda x: 0 < x <= 1, "in (0, 1]", hint="0.01 sends 1 % of the gradients")
    sparsifier: RuleOptions = field(default_factory=TopK.Options)
    memory: RuleOptions = field(default_factory=Residual.Options)
    collective: RuleOptions = field(default_factory=TopkA.Options)
    schedule: RuleOptions = field(default_factory=Constant.Options)
    dense_below: int = whole(1024)
    bucket_bytes: int = whole(25 * 2**20, least=1)

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
        """A configuration by the names of its rules.

        Args:
            density: As above.
            sparsifier: A key of ``SPARSIFIERS``.
            memory: A key of ``MEMORIES``.
            collective: A key of ``COLLECTIVES``.
            schedule: A key of ``SCHEDULES``.
            **settings: ``dense_below``, ``bucket_bytes``, and options of the four rules. Two rules may know the same
                one, as ``tau_threshold`` of Ok-Topk and its sparsifier: both get it.

        Raises:
            ValueError: A name or an option is unknown, or a value is out of range.
        """
        names = {"sparsifier": sparsifier, "memory": memory, "collective": collective, "schedule": schedule}
        rules = {kind: _KINDS[kind].find(name).Options.read(settings) for kind, name in names.items()}
        own = {name: settings[name] for name in ("dense_below", "bucket_bytes") if name in settings}
        known = {"dense_below", "bucket_bytes"}.union(*(options.known() for options in rules.values()))
        for name in settings:
            _lookup("option", name, dict.fromkeys(sorted(known)))
        return cls(density, **rules, **own)

    def __post_init__(self) -> None:
        """Checks everything that can be checked before a communicator and a model are there."""
        super().__post_init__()
        for kind in _KINDS:
            self._name(kind)
        sparsifier, schedule = self._make("sparsifier", ANYWHERE), self._make("schedule", ANYWHERE, self.density)
        name = self._name("sparsifier")
        if isinstance(self.collective, SharedIndices.Options) and not sparsifier.shares_indices:
            raise ValueError(
                f"collective 'shared' sends values without indices, but the sparsifier {name!r} chooses "
                "different indices on each rank: use randomblock, randomk or stable"
            )
        if schedule.weighs and not sparsifier.narrows:
            raise ValueError(
                f"schedule {self._name('schedule')!r} sends a part of what was selected, but the sparsifier {name!r} "
                "selects whole blocks for many steps, of which ranks would choose different ones: use another one, "
                "such as topk or randomk"
            )
        self._check_sketch()

    def _check_sketch(self) -> None:
        """A sketch is right in expectation only where what is sent does not depend on what it reads."""
        if not isinstance(self.memory, CompressedOptions) or self.memory.compressor != "sketch":
            return
        drawn = isinstance(self.sparsifier, (RandomBlock.Options, RandomK.Options))
        if not drawn or not isinstance(self.collective, SharedIndices.Options):
            raise ValueError(
                f"memory {self._name('memory')!r} with compressor 'sketch' needs positions that are drawn at random "
                f"and all applied, but has sparsifier {self._name('sparsifier')!r} with collective "
                f"{self._name('collective')!r}: a choice by magnitude prefers what the sketch overestimates, and more "
                "is delivered than was fed in, or less: use compressor='quantize', or sparsifier randomblock or "
                "randomk with collective 'shared'"
            )

    def k(self, size: int, density: float | None = None) -> int:
        """Number of entries that stand for ``size`` elements: round(density * size), at least 1 unless size is 0.

        Args:
            size: Number of elements.
            density: In force; None: as configured.
        """
        return min(size, max(1, round((self.density if density is None else density) * size)))

    @property
    def is_dense(self) -> bool:
        """True where everything travels in every step and nothing is remembered."""
        return isinstance(self.collective, Dense.Options) and isinstance(self.memory, NoMemory.Options)

    @property
    def replaces_momentum(self) -> bool:
        """True where the memory applies momentum, in the place of the optimizer."""
        return bool(self._rule("memory").replaces_momentum)

    @property
    def takes_momentum_over(self) -> bool:
        """True where that momentum is the optimizer's own; otherwise the optimizer must have none."""
        return self.momentum is not None and self.momentum.own is None

    @property
    def momentum(self) -> Any:
        """Options of the momentum that the memory applies, as of ``MomentumCorrection``; None: it applies none."""
        return self.memory if self.replaces_momentum else None

    def build(self, place: Place, transport: Any) -> tuple[Memory, Sparsifier, Collective, Schedule]:
        """One bucket's four parts. The collective is first: others may wait in it, and the rest may fail on one rank.

        Args:
            place: The bucket and the rank.
            transport: ``Transport`` of the ranks that take part.

        Raises:
            ValueError: An option does not fit a bucket of this size.
        """
        collective = self._make("collective", place, transport)
        memory, sparsifier = self._make("memory", place), self._make("sparsifier", place)
        return memory, sparsifier, collective, self._make("schedule", place, self.density)

    def facts(self) -> dict[str, Any]:
        """Everything that can change a result, as plain values: equal for equal configurations.

        Raises:
            ValueError: A rule is not registered in this process, as where the configuration came from another one.
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


def _plain(value: Any) -> Any:
    if isinstance(value, RuleOptions):
        facts = {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.compare}
        return {"of": type(value).__qualname__, **facts}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _schedule(tau: int, dense_steps: int, local: tuple[float, ...], total: tuple[float, ...]) -> dict[str, Any]:
    """Settings of a run: (low, high, scale) of the local threshold, (low, high, up, down) of the global one."""
    names = ("local_low", "local_high", "local_scale", "global_low", "global_high", "global_up", "global_down")
    bands = dict(zip(names, (*local, *total), strict=True))
    return {"tau_threshold": tau, "tau_partition": 64, "dense_steps": dense_steps, **bands}


# Li and Hoefler, PPoPP 2022, and the settings of the authors' runs. For the LSTM they name no global band of its own.
_PUBLISHED = {
    "vgg": _schedule(32, 512, local=(2 / 3, 5 / 4, 1.012), total=(2 / 3, 4 / 3, 1.008, 1.008)),
    "lstm": _schedule(32, 128, local=(3 / 4, 5 / 4, 1.012), total=(2 / 3, 4 / 3, 1.008, 1.008)),
    "bert": _schedule(128, 0, local=(4 / 5, 5 / 4, 1.025), total=(4 / 5, 5 / 4, 1.036, 1.025)),
}


class _OfHorovod:
    """A compressor of Horovod's own, looked up only when asked for: the rest works without Horovod."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        from horovod.torch.compression import Compression as OfHorovod

        return getattr(OfHorovod, self._name)


class Compression:
    """Presets, in the place of ``hvd.Compression``. Keywords are those of ``Sparse.of``."""

    none = _OfHorovod()
    fp16 = _OfHorovod()

    @staticmethod
    def recommended(density: float = 0.01, **settings: Any) -> Sparse:
        """The most accurate for its bytes: exact top-k after the optimizer's momentum, exchanged as by ``auto``.

        Values travel in 4 bits. The momentum of ``torch.optim.SGD``, ``Adam`` and ``AdamW`` is applied on each rank
        before the selection, and not in the optimizer's step; other optimizers keep theirs.
        """
        preset = {"sparsifier": "topk", "memory": "momentum", "collective": "auto", "wire": "log4"}
        return _preset(settings, density=density, **preset)

    @staticmethod
    def topka(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k with error feedback, gathered from every rank (SparCML): simple, good up to some 16 ranks."""
        return _preset(settings, density=density, sparsifier="topk", collective="topka")

    @staticmethod
    def topkdsa(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k, summed region by region and gathered sparse or dense (SparCML): for higher densities."""
        return _preset(settings, density=density, sparsifier="topk", collective="topkdsa")

    @staticmethod
    def gtopk(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k, of which a tree of merges keeps the k largest (gTop-k): few messages, for small buckets."""
        return _preset(settings, density=density, sparsifier="topk", collective="gtopk")

    @staticmethod
    def oktopk(density: float = 0.01, published: str | None = None, **settings: Any) -> Sparse:
        """Ok-Topk with its reused thresholds: a volume that does not grow with the number of ranks.

        Args:
            density: Fraction of the gradients; 0.01 to 0.02 in the paper.
            published: The settings of the paper for "vgg", "lstm" or "bert", dense steps at the start included.
            **settings: As for ``Sparse.of``.

        Raises:
            ValueError: A name is unknown or a value is out of range.
        """
        if published is not None:
            _lookup("published schedule", published, _PUBLISHED)
            settings = {**_PUBLISHED[published], **settings}
        return _preset(settings, density=density, sparsifier="reusedtopk", collective="oktopk")

    @staticmethod
    def threshold(threshold: float, density: float = 0.01, **settings: Any) -> Sparse:
        """All magnitudes of at least ``threshold``; how many these are changes from step to step."""
        settings = {"threshold": threshold, **settings}
        return _preset(settings, density=density, sparsifier="threshold", collective="topka")

    @staticmethod
    def gaussiank(density: float = 0.01, **settings: Any) -> Sparse:
        """About k entries, by a threshold for normally distributed gradients (GaussianK-SGD)."""
        return _preset(settings, density=density, sparsifier="gaussiank", collective="topka")

    @staticmethod
    def redsync(density: float = 0.01, **settings: Any) -> Sparse:
        """Between k and 2k entries, by a threshold found by bisection between mean and largest magnitude (RedSync)."""
        return _preset(settings, density=density, sparsifier="redsync", collective="topka")

    @staticmethod
    def dgc(density: float = 0.001, **settings: Any) -> Sparse:
        """Deep Gradient Compression: a sampled threshold, and momentum (0.9) before the selection.

        The optimizer must have momentum 0. With ``schedule="warmup"`` the density falls over the first epochs.
        """
        if settings.setdefault("memory", "momentum") == "momentum":
            settings = {"momentum": 0.9, "masking": True, **settings}
        return _preset(settings, density=density, sparsifier="dgc", collective="topka")

    @staticmethod
    def stable(density: float = 0.01, **settings: Any) -> Sparse:
        """Stable Top-K: whole blocks of positions, the same on every rank and for many steps; only values travel."""
        return _preset(settings, density=density, sparsifier="stable", collective="shared")

    @staticmethod
    def multilevel(density: float = 0.001, **settings: Any) -> Sparse:
        """Exact top-k by way of a larger selection."""
        return _preset(settings, density=density, sparsifier="multilevel", collective="topka")

    @staticmethod
    def randomk(density: float = 0.1, **settings: Any) -> Sparse:
        """Random positions that all ranks share, so that only values travel."""
        return _preset(settings, density=density, sparsifier="randomk", collective="shared")

    @staticmethod
    def randomblock(density: float = 0.01, **settings: Any) -> Sparse:
        """One block of positions that all ranks share, so that only values travel: cheapest, slowest to converge."""
        return _preset(settings, density=density, sparsifier="randomblock", collective="shared")

    @staticmethod
    def conef(density: float = 0.1, **settings: Any) -> Sparse:
        """Random blocks with contractive error feedback: a residual of 40 % of the usual size (ConEF)."""
        return _preset(settings, density=density, sparsifier="randomblock", memory="conef", collective="shared")

    @staticmethod
    def gravac(cf_min: float = 10.0, **settings: Any) -> Sparse:
        """Exact top-k whose compression factor adapts between ``cf_min`` and ``cf_max`` (GraVAC)."""
        if not is_number(cf_min) or cf_min < 1:
            raise ValueError(f"cf_min must be at least 1, not {cf_min!r}: 10 sends 10 % of the gradients at most")
        return _preset(settings, density=1 / cf_min, sparsifier="topk", collective="topka", schedule="gravac")

    @staticmethod
    def accordion(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k with a higher density while the gradients' norm changes (Accordion)."""
        return _preset(settings, density=density, sparsifier="topk", collective="topka", schedule="accordion")

    @staticmethod
    def hierarchical(density: float = 0.01, **settings: Any) -> Sparse:
        """TopkA between the ranks of a node and Ok-Topk between nodes: for several ranks (GPUs) on a node."""
        return _preset(settings, density=density, sparsifier="topk", collective="hierarchical")

    @staticmethod
    def auto(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k by the collective that is predicted to pay on the network found; dense if none does."""
        return _preset(settings, density=density, sparsifier="topk", collective="auto")

    @staticmethod
    def dense(**settings: Any) -> Sparse:
        """The whole bucket by a dense allreduce through our own buckets: the baseline of the sparse ones."""
        return _preset(settings, density=1.0, sparsifier="topk", memory="none", collective="dense")


# Not those inside brackets, as in warmup_densities=(0.3,0.1).
_COMMA = re.compile(r",(?![^(\[]*[)\]])")


def parse(spec: str) -> Any:
    """Reads a configuration from text, as a command line or a batch script holds it.

    Args:
        spec: ``preset`` or ``preset:key=value,key=value``, e.g. ``topka:density=0.01,memory=none``.

    Returns:
        A ``Sparse``, or Horovod's own compressor for ``none`` and ``fp16``.

    Raises:
        ValueError: A name is unknown (the message lists the known ones) or a value is out of range.
    """
    name, _, rest = spec.partition(":")
    presets = {one: value for one, value in vars(Compression).items() if not one.startswith("_")}
    _lookup("compression", name, presets)
    pairs = [_setting(item, spec) for item in _COMMA.split(rest) if item]
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise ValueError(f"{spec!r} gives a setting twice: write each of {', '.join(settings)} once")
    preset = getattr(Compression, name)
    if isinstance(presets[name], staticmethod):
        missing = [key for key, one in inspect.signature(preset).parameters.items() if _required(one, settings)]
        if missing:
            raise ValueError(f"compression {name!r} needs {missing[0]}, as in {name}:{missing[0]}=0.1")
        return preset(**settings)
    if settings:
        raise ValueError(f"compression {name!r} is Horovod's own and takes no settings, but {spec!r} has {rest!r}")
    return preset


def _required(parameter: inspect.Parameter, settings: Mapping[str, Any]) -> bool:
    named = parameter.kind is not inspect.Parameter.VAR_KEYWORD
    return named and parameter.default is inspect.Parameter.empty and parameter.name not in settings


def _preset(settings: dict[str, Any], **preset: Any) -> Sparse:
    """A preset with the user's settings laid over it."""
    return Sparse.of(**{**preset, **settings})


def _setting(item: str, spec: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{item!r} in {spec!r} is not of the form key=value")
    try:
        return key.strip(), ast.literal_eval(value.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two of many brackets
        return key.strip(), value.strip()


def _lookup(what: str, name: Any, known: Mapping[str, Any]) -> Any:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {what} {name!r}; known are: {', '.join(known)}")
    return known[name]
