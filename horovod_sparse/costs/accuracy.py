"""Accuracy that was measured for the candidates of `auto`, which compares their times only.

The rule that rests on it, and the collectives that it excludes: docs/schedules.md, "What is equally good". A training
that is added here belongs in the table of that page, too.
"""

from __future__ import annotations

from dataclasses import dataclass

# Sums in the total of Ok-Topk, as a multiple of k, from which it trains as well as what delivers all entries. Adaptive
# optimizers divide what comes late by what has come at once, so they need a part of all that was sent.
KEEP, KEEP_OF_RANKS = 4.0, 0.5


@dataclass(frozen=True)
class Training:
    """Result of a training on the text model `stdlib` with `recommended` at a fixed density.

    Attributes:
        optimizer: "SGD" or "AdamW".
        ranks: World size; simulated.
        steps: Number of steps.
        seeds: Number of trainings, of which the mean is given.
        collective: Name from CANDIDATES; "oktopk" with ``keep="auto"``.
        density: Fraction of the gradients that a rank sends.
        perplexity: Validation perplexity at the end.
        dense: Perplexity of dense training, for SGD with Nesterov's momentum.
    """

    optimizer: str
    ranks: int
    steps: int
    seeds: int
    collective: str
    density: float
    perplexity: float
    dense: float

    @property
    def loss(self) -> float:
        """Relative increase of the perplexity over that of dense training."""
        return self.perplexity / self.dense - 1


# python -m benchmarks.convergence --simulate --ranks RANKS --batch 1 --tasks stdlib --seeds SEEDS --compression
# recommended:density=DENSITY,collective=COLLECTIVE; on 4 ranks without --batch.
TRAININGS = (
    Training("SGD", 4, 1000, 5, "topka", 0.01, 22.90, 22.85),
    Training("SGD", 4, 1000, 1, "oktopk", 0.01, 22.85, 22.97),
    Training("AdamW", 4, 1000, 3, "topka", 0.01, 25.40, 24.82),
    Training("AdamW", 4, 1000, 1, "oktopk", 0.01, 25.29, 24.86),
    Training("SGD", 16, 1000, 1, "topka", 0.01, 22.96, 22.97),
    Training("SGD", 16, 1000, 1, "topka", 0.005, 23.34, 22.97),
    Training("SGD", 16, 1000, 1, "topka", 0.002, 24.73, 22.97),
    Training("SGD", 16, 1000, 3, "oktopk", 0.01, 23.09, 22.97),
    Training("SGD", 64, 300, 3, "topka", 0.01, 36.56, 36.04),
    Training("SGD", 64, 300, 3, "oktopk", 0.01, 36.77, 36.04),
    Training("SGD", 64, 1000, 1, "oktopk", 0.01, 19.03, 18.73),
    Training("AdamW", 16, 1000, 1, "topka", 0.01, 24.49, 24.82),
    Training("AdamW", 16, 1000, 3, "oktopk", 0.01, 24.6354, 24.8048),
    Training("AdamW", 64, 300, 1, "topka", 0.01, 33.68, 32.20),
    Training("AdamW", 64, 300, 3, "oktopk", 0.01, 33.52, 31.78),
    Training("AdamW", 64, 1000, 1, "oktopk", 0.01, 18.92, 19.09),
)


def sums(keep: float | str | None, ranks: int, adaptive: bool) -> float | None:
    """Return the option ``keep`` of Ok-Topk as a number.

    Args:
        keep: The option; "auto": 4, with an adaptive optimizer at least half of the number of ranks.
        ranks: World size P.
        adaptive: Whether the optimizer is adaptive, as in ``BucketContext``.
    """
    if isinstance(keep, str):
        return max(KEEP, KEEP_OF_RANKS * ranks) if adaptive else KEEP
    return keep


def known(density: float, ranks: int, optimizer: str) -> Training | None:
    """Return the least accurate training with an optimizer on the nearest number of ranks; None if there is none.

    Args:
        density: Density in question; the training has the largest measured one that does not exceed it.
        ranks: World size in question.
        optimizer: "SGD" or "AdamW".
    """
    found = [one for one in TRAININGS if one.optimizer == optimizer and one.density <= density]
    measured = max((one.density for one in found), default=None)
    nearest = sorted(found, key=lambda one: (max(one.ranks / ranks, ranks / one.ranks), -one.loss))
    return next((one for one in nearest if one.density == measured), None)
