"""Presets: named configurations, by published method or by purpose."""

from __future__ import annotations

from typing import Any

from horovod_sparse.config.lookup import lookup
from horovod_sparse.config.sparse import Sparse
from horovod_sparse.rules.options import is_number


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
            lookup("published schedule", published, _PUBLISHED)
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


def _preset(settings: dict[str, Any], **preset: Any) -> Sparse:
    """A preset with the user's settings laid over it."""
    return Sparse.of(**{**preset, **settings})
