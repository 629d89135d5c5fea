"""Presets: named configurations, by published method or by purpose."""

from __future__ import annotations

from typing import Any

from horovod_sparse.collectives.auto import Auto
from horovod_sparse.config.sparse import Sparse
from horovod_sparse.rules.options import is_number
from horovod_sparse.rules.registry import lookup


def _schedule(tau: int, dense_steps: int, local: tuple[float, ...], total: tuple[float, ...]) -> dict[str, Any]:
    """Return settings of a run: (low, high, scale) of the local threshold, (low, high, up, down) of the global one."""
    names = ("local_low", "local_high", "local_scale", "global_low", "global_high", "global_up", "global_down")
    bands = dict(zip(names, (*local, *total), strict=True))
    return {"tau_threshold": tau, "tau_partition": 64, "dense_steps": dense_steps, **bands}


# Settings of the authors' runs (Li and Hoefler, PPoPP 2022). They name no global band for the LSTM: it uses VGG's.
_PUBLISHED = {
    "vgg": _schedule(32, 512, local=(2 / 3, 5 / 4, 1.012), total=(2 / 3, 4 / 3, 1.008, 1.008)),
    "lstm": _schedule(32, 128, local=(3 / 4, 5 / 4, 1.012), total=(2 / 3, 4 / 3, 1.008, 1.008)),
    "bert": _schedule(128, 0, local=(4 / 5, 5 / 4, 1.025), total=(4 / 5, 5 / 4, 1.036, 1.025)),
}


class _OfHorovod:
    """A Horovod compressor, imported on first access, so that everything else works without Horovod."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        try:
            from horovod.torch.compression import Compression as OfHorovod
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "horovod":
                raise
            raise ModuleNotFoundError(
                f"Compression.{self._name} is Horovod's own, and Horovod is not installed: choose 'dense', or install "
                "it as in docs/install.md",
                name=error.name,
            ) from error
        return getattr(OfHorovod, self._name)


class Compression:
    """Named presets, for use instead of ``hvd.Compression``.

    Each preset returns a ``Sparse``; its description says what that sends in a step. k is ``density`` times the number
    of elements of a bucket. Entries that are not sent stay in the residual unless stated otherwise.

    Further keywords go to ``Sparse.of`` and override the preset, as in
    ``hvs.Compression.topka(density=0.01, wire="float16")``. ``none`` and ``fp16`` are Horovod's own compressors.
    """

    none = _OfHorovod()
    fp16 = _OfHorovod()

    @staticmethod
    def recommended(density: float | None = None, **settings: Any) -> Sparse:
        """Send the k largest entries after momentum, with values in 4 bits, over the collective that ``auto`` chooses.

        Without a density, the first hundred steps try several, and the largest that costs no time is used from then on;
        on a fast network everything is sent (see ``Measured``). Timing decides, so two runs may differ, unless the
        second repeats the decisions of the first.

        The most accurate preset for the bytes that it sends. With Ok-Topk, owners keep the sums that they do not send
        (``keep="auto"``), as with ``auto``; with adaptive optimizers on many ranks, more sums come down. The momentum
        of ``torch.optim.SGD``, ``Adam``, ``AdamW`` and ``Muon`` is applied on each rank before the selection. As delay
        acts as momentum, too, 40 % of every gradient bypasses the velocity; ``fresh=None`` keeps the form of the
        optimizer's momentum instead. What a step delivers is limited to 1.5 times the mean of earlier steps, so that
        high learning rates do not diverge. The momentum of other optimizers is applied after the exchange.
        """
        preset: dict[str, Any] = {"sparsifier": "topk", "memory": "momentum", "collective": "auto", "wire": "log4"}
        if settings.get("memory", "momentum") == "momentum":
            preset |= {"fresh": 0.4, "limit": 1.5}
        collective = settings.get("collective", "auto")  # the default of auto
        if collective == "oktopk" or (collective == "hierarchical" and settings.get("outer", "oktopk") == "oktopk"):
            preset["keep"] = Auto.Options().keep
        if density is None:
            density, preset["schedule"] = 0.01, "measured"
            if "densities" not in settings and settings.get("schedule", "measured") == "measured":
                preset["least"] = 0.001
        return _preset(settings, density=density, **preset)

    @staticmethod
    def topka(density: float = 0.01, **settings: Any) -> Sparse:
        """Send the k largest entries of each rank to all ranks (SparCML); the bytes grow with the world size."""
        return _preset(settings, density=density, sparsifier="topk", collective="topka")

    @staticmethod
    def union(density: float = 0.01, **settings: Any) -> Sparse:
        """Send all ranks' values wherever any rank has one of its k largest entries.

        What a step updates, it updates by the sum over all ranks; up to P k positions are sent.
        """
        return _preset(settings, density=density, sparsifier="topk", collective="union")

    @staticmethod
    def topkdsa(density: float = 0.01, **settings: Any) -> Sparse:
        """Sum the k largest entries region by region, and gather the sums sparse or dense (SparCML).

        For densities of several percent.
        """
        return _preset(settings, density=density, sparsifier="topk", collective="topkdsa")

    @staticmethod
    def gtopk(density: float = 0.01, **settings: Any) -> Sparse:
        """Keep the k largest sums of the k largest entries, in a tree of merges (gTop-k).

        Few messages: for small buckets and networks with a high latency.
        """
        return _preset(settings, density=density, sparsifier="topk", collective="gtopk")

    @staticmethod
    def oktopk(density: float = 0.01, published: str | None = None, **settings: Any) -> Sparse:
        """Keep about the k largest sums, with a volume per rank that does not grow with the world size (Ok-Topk).

        Args:
            density: Fraction of the gradients that each rank sends; 0.01 to 0.02 in the paper.
            published: "vgg", "lstm" or "bert": the paper's settings for this model, with its dense steps at the start.
            **settings: Keywords for ``Sparse.of``; they also override published settings.

        Raises:
            ValueError: A name is unknown or a value is out of range.
        """
        if published is not None:
            settings = {**lookup("published schedule", published, _PUBLISHED), **settings}
        return _preset(settings, density=density, sparsifier="reusedtopk", collective="oktopk")

    @staticmethod
    def spardl(density: float = 0.01, **settings: Any) -> Sparse:
        """Keep about the k largest sums, by a reduce-scatter that cuts its blocks in every hop (SparDL).

        Few messages, and a volume per rank that does not grow with the world size.
        """
        return _preset(settings, density=density, sparsifier="topk", collective="spardl")

    @staticmethod
    def threshold(threshold: float, density: float = 0.01, **settings: Any) -> Sparse:
        """Send all entries with a magnitude of at least ``threshold``; their number varies from step to step."""
        settings = {"threshold": threshold, **settings}
        return _preset(settings, density=density, sparsifier="threshold", collective="topka")

    @staticmethod
    def gaussiank(density: float = 0.01, **settings: Any) -> Sparse:
        """Send about k entries: those above a threshold for normally distributed gradients (GaussianK-SGD)."""
        return _preset(settings, density=density, sparsifier="gaussiank", collective="topka")

    @staticmethod
    def redsync(density: float = 0.01, **settings: Any) -> Sparse:
        """Send about k to 2k entries: those above a threshold found by bisection (RedSync)."""
        return _preset(settings, density=density, sparsifier="redsync", collective="topka")

    @staticmethod
    def sidco(density: float = 0.01, **settings: Any) -> Sparse:
        """Send about k entries: those above a threshold fitted in stages to the tail of the magnitudes (SIDCo)."""
        return _preset(settings, density=density, sparsifier="sidco", collective="topka")

    @staticmethod
    def micro(density: float = 0.01, **settings: Any) -> Sparse:
        """Send all ranks' values at about k positions, of which each rank selects a share in its own part (MiCRO).

        The number of positions does not grow with the world size.
        """
        return _preset(settings, density=density, sparsifier="micro", collective="union")

    @staticmethod
    def exdyna(density: float = 0.01, **settings: Any) -> Sparse:
        """Send all ranks' values at about k positions, as ``micro``, with parts that balance the shares (ExDyna)."""
        return _preset(settings, density=density, sparsifier="exdyna", collective="union")

    @staticmethod
    def deft(density: float = 0.01, **settings: Any) -> Sparse:
        """Send all ranks' values at k positions, of which each rank selects the largest of some layers (DEFT)."""
        return _preset(settings, density=density, sparsifier="deft", collective="union")

    @staticmethod
    def artopk(density: float = 0.01, **settings: Any) -> Sparse:
        """Send all ranks' values at the positions of one rank's k largest entries, each rank's in turn (AR-Topk)."""
        return _preset(settings, density=density, sparsifier="artopk", collective="union")

    @staticmethod
    def dgc(density: float = 0.001, **settings: Any) -> Sparse:
        """Send about k entries after momentum: those above a sampled threshold (Deep Gradient Compression).

        The momentum is 0.9, and the optimizer must have none; ``momentum=None`` uses the optimizer's instead.
        With ``schedule="warmup"`` the density falls to its final value over the first epochs.
        """
        if settings.setdefault("memory", "momentum") == "momentum":
            settings = {"momentum": 0.9, "masking": True, **settings}
        return _preset(settings, density=density, sparsifier="dgc", collective="topka")

    @staticmethod
    def stable(density: float = 0.01, **settings: Any) -> Sparse:
        """Send the values of the best blocks over all ranks, chosen once for many steps (Stable Top-K)."""
        return _preset(settings, density=density, sparsifier="stable", collective="shared")

    @staticmethod
    def arctopk(density: float = 0.1, **settings: Any) -> Sparse:
        """Send the values of the blocks with the largest sum over all ranks, found by a sketch (ARC-Top-K)."""
        return _preset(settings, density=density, sparsifier="arctopk", collective="shared")

    @staticmethod
    def multilevel(density: float = 0.001, **settings: Any) -> Sparse:
        """Send the k largest entries, selected in two levels as in GraVAC."""
        return _preset(settings, density=density, sparsifier="multilevel", collective="topka")

    @staticmethod
    def randomk(density: float = 0.1, **settings: Any) -> Sparse:
        """Send the values at k random positions that all ranks share."""
        return _preset(settings, density=density, sparsifier="randomk", collective="shared")

    @staticmethod
    def randomblock(density: float = 0.01, **settings: Any) -> Sparse:
        """Send the values of one random block that all ranks share: cheapest, and slowest to converge."""
        return _preset(settings, density=density, sparsifier="randomblock", collective="shared")

    @staticmethod
    def conef(density: float = 0.1, **settings: Any) -> Sparse:
        """Send random blocks, with a residual compressed to 40 % of its usual size (contractive error feedback)."""
        return _preset(settings, density=density, sparsifier="randomblock", memory="conef", collective="shared")

    @staticmethod
    def gravac(cf_min: float = 10.0, **settings: Any) -> Sparse:
        """Send the largest entries, with a compression factor that adapts between ``cf_min`` and ``cf_max`` (GraVAC).

        A factor of 10 stands for a density of 10 %.
        """
        if not is_number(cf_min) or cf_min < 1:
            raise ValueError(f"cf_min must be at least 1, not {cf_min!r}: 10 sends 10 % of the gradients at most")
        return _preset(settings, density=1 / cf_min, sparsifier="topk", collective="topka", schedule="gravac")

    @staticmethod
    def accordion(density: float = 0.01, **settings: Any) -> Sparse:
        """Send the k largest entries, and more of them while the norm of the gradients changes (Accordion)."""
        return _preset(settings, density=density, sparsifier="topk", collective="topka", schedule="accordion")

    @staticmethod
    def hierarchical(density: float = 0.01, **settings: Any) -> Sparse:
        """Sum the k largest entries with TopkA within nodes and Ok-Topk between nodes: for several GPUs per node."""
        return _preset(settings, density=density, sparsifier="topk", collective="hierarchical")

    @staticmethod
    def auto(density: float = 0.01, **settings: Any) -> Sparse:
        """Send the k largest entries over the collective predicted to be fastest; everything if dense is faster.

        Collectives that train less well at the same density, such as ``gtopk``, are no candidates. Network and kernels
        are measured before the first exchange, in about a second.
        """
        return _preset(settings, density=density, sparsifier="topk", collective="auto")

    @staticmethod
    def dense(**settings: Any) -> Sparse:
        """Send everything in a dense allreduce, through the same buckets: the baseline of the sparse presets.

        With ``wire="bfloat16"``, "float16" or "log8", values take 16 or 8 bits, and the residual keeps rounding errors.
        """
        memory = "none" if settings.get("wire") is None else "residual"
        return _preset(settings, density=1.0, sparsifier="topk", memory=memory, collective="dense")

    @staticmethod
    def onebit(**settings: Any) -> Sparse:
        """Send the signs of everything, and a scale for every 256 entries, in a dense allreduce: 1/28 of the bytes.

        Both roundings, of a rank's gradient and of the sum, have error feedback, as in 1-bit Adam; nothing else waits.
        """
        return Compression.dense(**{"wire": "sign", **settings})

    @staticmethod
    def sparseloco(density: float = 1 / 64, **settings: Any) -> Sparse:
        """Send the largest entries of each chunk of 4096, with values in 2 bits: for local steps (SparseLoCo).

        The density is that of the paper, 64 of 4096. Its residual decays: ``decay=0.95``. By default nothing is lost.
        """
        return _preset(
            settings, density=density, sparsifier="chunked", memory="residual", collective="topka", wire="fitted2"
        )


def _preset(settings: dict[str, Any], **preset: Any) -> Sparse:
    """Return a preset, overridden by the user's settings."""
    return Sparse.of(**{**preset, **settings})
