"""What to send and how: one frozen configuration, its presets and its text form."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from horovod_sparse.collectives import COLLECTIVES, Collective, keywords, make
from horovod_sparse.kernels.types import Array
from horovod_sparse.memories import MEMORIES, Memory
from horovod_sparse.sparsifiers import SPARSIFIERS, Sparsifier

_KINDS: dict[str, Mapping[str, type[Any]]] = {
    "sparsifier": SPARSIFIERS,
    "memory": MEMORIES,
    "collective": COLLECTIVES,
}


@dataclass(frozen=True)
class Sparse:
    """Configuration of a sparse exchange; every rank must use the same.

    Args:
        density: Fraction of a bucket's gradients that a rank sends each step, in (0, 1].
        sparsifier: Name of the rule that chooses them.
        memory: Name of the rule for what is not sent.
        collective: Name of the sparse allreduce.
        dense_below: Parameters with fewer elements take Horovod's own allreduce: little to save, much to lose.
        bucket_bytes: Gradients travel together up to this size. Larger buckets cost fewer messages, smaller ones
            overlap more of the exchange with the backward pass.
        options: Keyword options of the three classes named, such as ``threads`` of the sparsifier.

    Raises:
        ValueError: A value is out of range, or a name or option is unknown.
    """

    density: float
    sparsifier: str = "topk"
    memory: str = "residual"
    collective: str = "topka"
    dense_below: int = 1024
    bucket_bytes: int = 25 * 2**20
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks everything that can be checked before a communicator and a model are there."""
        if not _is_number(self.density) or not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], not {self.density!r}: 0.01 sends 1 % of the gradients")
        for name, least in (("dense_below", 0), ("bucket_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        for kind, known in _KINDS.items():
            _lookup(kind, getattr(self, kind), known)
        allowed = {option for kind, known in _KINDS.items() for option in keywords(known[getattr(self, kind)])}
        for option in self.options:
            _lookup("option", option, dict.fromkeys(sorted({*allowed, *_SETTINGS})))
        if self.collective == "shared" and not getattr(SPARSIFIERS[self.sparsifier], "shares_indices", False):
            sharing = [name for name, kind in SPARSIFIERS.items() if getattr(kind, "shares_indices", False)]
            raise ValueError(
                f"collective 'shared' sends values without indices, but the sparsifier {self.sparsifier!r} chooses "
                f"different indices on each rank: use {' or '.join(sharing)}"
            )

    def k(self, size: int) -> int:
        """Number of entries that stand for ``size`` elements: round(density * size), at least 1 unless size is 0."""
        return min(size, max(1, round(self.density * size)))

    def build(self, size: int, like: Array, comm: Any) -> tuple[Memory, Sparsifier, Collective]:
        """One bucket's three parts.

        Args:
            size: Elements of the bucket.
            like: Array whose dtype and device the memory takes.
            comm: mpi4py communicator of the ranks that take part.
        """
        memory = MEMORIES[self.memory](size, like, **self._options_of("memory"))  # type: ignore[call-arg]
        sparsifier = SPARSIFIERS[self.sparsifier](**self._options_of("sparsifier"))
        return memory, sparsifier, make(self.collective, comm, self.options)

    def _options_of(self, kind: str) -> dict[str, Any]:
        """The options that this kind's class takes."""
        known = keywords(_KINDS[kind][getattr(self, kind)])
        return {name: value for name, value in self.options.items() if name in known}


_SETTINGS = tuple(one.name for one in fields(Sparse) if one.name != "options")


def _schedule(tau: int, dense_steps: int, local: tuple[float, ...], total: tuple[float, ...]) -> dict[str, Any]:
    """Options of an Ok-Topk run: (low, high, scale) of the local threshold, (low, high, up, down) of the global one."""
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
    """Presets, in the place of ``hvd.Compression``. Keywords are those of ``Sparse`` and of the classes it names."""

    none = _OfHorovod()
    fp16 = _OfHorovod()

    @staticmethod
    def topka(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k with error feedback, gathered from every rank (SparCML): simple, good up to some 16 ranks."""
        return _sparse(settings, density=density, sparsifier="topk", collective="topka")

    @staticmethod
    def topkdsa(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k, summed region by region and gathered sparse or dense (SparCML): for higher densities."""
        return _sparse(settings, density=density, sparsifier="topk", collective="topkdsa")

    @staticmethod
    def gtopk(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k, of which a tree of merges keeps the k largest (gTop-k): few messages, for small buckets."""
        return _sparse(settings, density=density, sparsifier="topk", collective="gtopk")

    @staticmethod
    def oktopk(density: float = 0.01, published: str | None = None, **settings: Any) -> Sparse:
        """Ok-Topk with its reused thresholds: a volume that does not grow with the number of ranks.

        Args:
            density: Fraction of the gradients; 0.01 to 0.02 in the paper.
            published: The settings of the paper for "vgg", "lstm" or "bert", dense steps at the start included.
            **settings: Of ``Sparse``, ``ReusedTopK`` and ``OkTopk``.

        Raises:
            ValueError: A name is unknown or a value is out of range.
        """
        if published is not None:
            _lookup("published schedule", published, _PUBLISHED)
            settings = {**_PUBLISHED[published], **settings}
        return _sparse(settings, density=density, sparsifier="reusedtopk", collective="oktopk")

    @staticmethod
    def randomblock(density: float = 0.01, **settings: Any) -> Sparse:
        """One block of positions that all ranks share, so that only values travel: cheapest, slowest to converge."""
        return _sparse(settings, density=density, sparsifier="randomblock", collective="shared")

    @staticmethod
    def hierarchical(density: float = 0.01, **settings: Any) -> Sparse:
        """TopkA between the ranks of a node and Ok-Topk between nodes: for several ranks (GPUs) on a node."""
        return _sparse(settings, density=density, sparsifier="topk", collective="hierarchical")

    @staticmethod
    def auto(density: float = 0.01, **settings: Any) -> Sparse:
        """Exact top-k by whatever collective is predicted to be fastest on the network found; dense if none is."""
        return _sparse(settings, density=density, sparsifier="topk", collective="auto")

    @staticmethod
    def dense(**settings: Any) -> Sparse:
        """The whole bucket by MPI Allreduce through our own buckets: the baseline of the sparse ones."""
        return _sparse(settings, density=1.0, sparsifier="topk", memory="none", collective="dense")


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
    settings = dict(_setting(item, spec) for item in rest.split(",") if item)
    preset = getattr(Compression, name)
    if isinstance(presets[name], staticmethod):
        return preset(**settings)
    if settings:
        raise ValueError(f"compression {name!r} is Horovod's own and takes no settings, but {spec!r} has {rest!r}")
    return preset


def _sparse(settings: dict[str, Any], **preset: Any) -> Sparse:
    """A preset with the user's settings laid over it; keys that are not fields of Sparse are options."""
    chosen = {**preset, **{key: value for key, value in settings.items() if key in _SETTINGS}}
    return Sparse(**chosen, options={key: value for key, value in settings.items() if key not in _SETTINGS})


def _setting(item: str, spec: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{item!r} in {spec!r} is not of the form key=value")
    try:
        return key.strip(), ast.literal_eval(value.strip())
    except (SyntaxError, ValueError):
        return key.strip(), value.strip()


def _lookup(what: str, name: Any, known: Mapping[str, Any]) -> None:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {what} {name!r}; known are: {', '.join(known)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
