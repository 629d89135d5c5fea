"""Published orderings of the compressions, and the verdict of the records on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.convergence.results import Interval, Results
from benchmarks.convergence.runs import (
    ADAM,
    DENSE,
    FSDP,
    MUON,
    PLAIN,
    POWERSGD_RANKS,
    RIVALS,
    TUNED,
    grid_name,
    heavy_name,
    recommended_name,
)

HOLDS, BETTER, WORSE, UNDECIDED = "holds", "better", "worse", "undecided"

# Negligible differences: points of accuracy, percent of perplexity. Close to the published gaps.
TOLERANCE = {"accuracy": 0.5, "perplexity": 2.0}
# Negligible differences for our own targets.
TARGET = {"accuracy": 0.15, "perplexity": 1.0}


@dataclass(frozen=True)
class Verdict:
    """Verdict of the records on a claim, for one task."""

    word: str  # HOLDS; BETTER or WORSE, of what is claimed about; UNDECIDED; or empty: figures only
    numbers: str  # the figures behind the verdict


Check = Callable[[Results, str], Verdict]


@dataclass(frozen=True)
class Claim:
    """An ordering that is claimed."""

    name: str  # the ordering in words
    runs: Sequence[str]  # names of the compared runs
    check: Check  # compares the runs on a task where all of them were measured

    def verdicts(self, results: Results) -> Iterator[tuple[str, Verdict]]:
        """Yield each task that has all the runs, with its verdict."""
        for task in results.tasks:
            if all(results.of(task, run) for run in self.runs):
                yield task, self.check(results, task)


def near(name: str, run: str, other: str, tolerances: Mapping[str, float] = TOLERANCE) -> Claim:
    """Return a claim that two runs end within the tolerance of each other, in either direction."""

    def check(results: Results, task: str) -> Verdict:
        loss, tolerance = results.loss(task, run, other), tolerances[results.of(task, run)[0]["metric"]]
        inside = -tolerance <= loss.low and loss.high <= tolerance
        return Verdict(_word(inside, loss.high < -tolerance, loss.low > tolerance), _shown(loss))

    return Claim(name, (run, other), check)


def worse(name: str, run: str, than: str, by: float = 0.0) -> Claim:
    """Return a claim that a run ends more than ``by`` tolerances behind another."""

    def check(results: Results, task: str) -> Verdict:
        loss, least = results.loss(task, run, than), by * _tolerance(results, task, run)
        return Verdict(_word(loss.low > least, loss.high < least), _shown(loss))

    return Claim(name, (run, than), check)


def fewer(counted: Callable[[Results, str, str], float], name: str, run: str, than: str, factor: float) -> Claim:
    """Return a claim that a run sends at least ``factor`` times less than another.

    ``counted`` is a method of ``Results`` that counts what is sent per step, which does not depend on the seed.
    """

    def check(results: Results, task: str) -> Verdict:
        found = counted(results, task, than) / counted(results, task, run)
        return Verdict(HOLDS if found >= factor else WORSE, f"{found:.1f}x")

    return Claim(name, (run, than), check)


def ratio(counted: Callable[[Results, str, str], float], name: str, run: str, than: str) -> Claim:
    """Return how many times less a run sends than another, without a verdict; ``counted``: as for ``fewer``."""

    def check(results: Results, task: str) -> Verdict:
        return Verdict("", f"{counted(results, task, than) / counted(results, task, run):.1f}x")

    return Claim(name, (run, than), check)


def _tolerance(results: Results, task: str, run: str) -> float:
    return TOLERANCE[results.of(task, run)[0]["metric"]]


def _word(holds: bool, better: bool, worse: bool = False) -> str:
    return HOLDS if holds else BETTER if better else WORSE if worse else UNDECIDED


def _shown(loss: Interval) -> str:
    """Return a loss and half of its interval as text, in percent."""
    if math.isinf(loss.middle):
        return "diverged"
    spread = "one seed" if math.isinf(loss.half) else f"± {loss.half:.2f}"
    return f"{loss.middle:+.2f} {spread}"


_BYTES, _LATE_BYTES, _FLOATS = Results.bytes_per_step, Results.late_bytes_per_step, Results.floats_per_step
_BEST = grid_name(64, 5)

# Claims by section of the report.
CLAIMS: dict[str, Sequence[Claim]] = {
    "top-k": (
        near("Top-k at 1 % ends near dense (Lin et al. 2018)", "topka", DENSE),
        worse("without feedback, top-k ends worse (Stich et al. 2018)", "topka-nofeedback", "topka"),
        near("gTop-k ends near top-k (Shi et al. 2019)", "gtopk", "topka"),
        near("Ok-Topk ends near top-k (Li and Hoefler 2022)", "oktopk", "topka"),
        fewer(_BYTES, "gTop-k sends fewer bytes than TopkA (Shi et al. 2019)", "gtopk", "topka", 1.2),
        fewer(_BYTES, "Ok-Topk sends fewer bytes than TopkA (Li and Hoefler 2022)", "oktopk", "topka", 1.2),
        near("Gaussian-k ends near top-k (Shi et al. 2019)", "gaussiank", "topka"),
        near("bfloat16 values lose nothing (ours)", "topka-bfloat16", "topka"),
    ),
    "Yoon and Oh": (
        near("Top-k at 0.1 % ends slightly under dense: within the tolerance", "topka-1000", DENSE),
        worse("Top-k at 0.1 % ends slightly under dense: below it", "topka-1000", DENSE),
        worse("Random-k without memory ends clearly worse than top-k", "randomk-1000-none", "topka-1000", by=2),
    ),
    "Stable Top-K": (
        near("Stable Top-K, tuned, ends near dense", _BEST, DENSE),
        worse("Ok-Topk at the same density ends worse than Stable Top-K", "oktopk-10%", _BEST),
        worse("Ok-Topk with the same bytes ends worse than Stable Top-K", "oktopk-10%", "stable-22%"),
        worse("a block that is too small ends worse", grid_name(1, 5), _BEST),
        worse("a block that is too large ends worse", grid_name(4096, 5), _BEST),
        worse("too rare a refresh ends worse", grid_name(64, 100), _BEST),
    ),
    "ConEF": (
        worse("random blocks without feedback end clearly worse than SGD", "randomblock-none", PLAIN, by=2),
        near("error feedback ends near SGD", "randomblock", PLAIN),
        *(
            near(f"ConEF with {saved} % saved ends near error feedback", f"conef-{saved}", "randomblock")
            for saved in (60, 80, 90)
        ),
        *(
            near(f"improved ConEF with {saved} % saved ends near error feedback", f"iconef-{saved}", "randomblock")
            for saved in (60, 90)
        ),
    ),
    "ConEF with Adam": (
        near(
            "improved ConEF with 90 % saved ends near error feedback, with Adam", "iconef-90-adam", "randomblock-adam"
        ),
    ),
    "Stable Top-K with Adam": (
        worse(
            "Ok-Topk at the same density ends worse than Stable Top-K, with Adam", "oktopk-10%-adam", f"{_BEST}-adam"
        ),
    ),
    "GraVAC": (
        *(near(f"GraVAC with eps = {eps} ends near dense", f"gravac-{eps}", DENSE) for eps in (0.49, 0.7, 0.9)),
        *(
            fewer(
                _FLOATS,
                f"GraVAC (eps = {eps}) sends 13 to 289 times fewer floats than dense",
                f"gravac-{eps}",
                DENSE,
                13,
            )
            for eps in (0.49, 0.7, 0.9)
        ),
        fewer(_FLOATS, "GraVAC (eps = 0.7) sends fewer floats than a fixed factor of 10", "gravac-0.7", "topka-10", 1),
        *(
            worse(f"a fixed factor of 1000 ({name}) ends worse than GraVAC", f"{name}-1000", "gravac-0.7")
            for name in ("topka", "dgc", "redsync")
        ),
        worse("a fixed factor of 1000 (randomk) ends worse than GraVAC with it", "randomk-1000", "gravac-randomk"),
    ),
    "Accordion": (
        near("GraVAC ends near Accordion, both with Random-k", "gravac-randomk", "accordion-randomk"),
        fewer(
            _FLOATS,
            "GraVAC sends 22 to 104 times fewer floats than Accordion, both with Random-k",
            *("gravac-randomk", "accordion-randomk", 22),
        ),
    ),
    "Recommended": (
        *(
            near(f"1 % ends within 0.15 points or 1 % of {form} training", recommended_name(1), run, TARGET)
            for form, run in (("dense", DENSE), ("dense Nesterov", "dense-nesterov"))
        ),
        worse("dense training with the script's momentum ends behind 1 %", DENSE, recommended_name(1)),
        worse("1 % with heavy-ball momentum ends behind 1 %", heavy_name(1), recommended_name(1)),
        worse("1 % with heavy-ball momentum ends behind 0.2 %", heavy_name(1), recommended_name(0.2)),
        near("1 % with heavy-ball momentum ends within 0.15 points or 1 % of dense", heavy_name(1), DENSE, TARGET),
        near("so it does at 10 %", heavy_name(10), DENSE, TARGET),
        *(
            claim
            for rank, percent in RIVALS
            for name in (recommended_name, heavy_name)
            for rival, ours in [(f"powersgd-{rank}", name(percent))]
            for claim in (
                worse(f"PowerSGD with rank {rank} ends behind {ours}", rival, ours),
                ratio(_LATE_BYTES, f"bytes of rank {rank} over those of {ours}", ours, rival),
            )
        ),
    ),
    "Momentum": (
        worse("top-k with momentum after the selection ends behind", "topka", "momentum"),
        worse("masking costs accuracy", "momentum-masked", "momentum"),
        worse("dense first steps help", "momentum", "momentum-dense-first"),
    ),
    "Ahead": (
        near("gradients ahead by the ranks' mean residual: within 1 % of dense", "ahead-mean", DENSE, TARGET),
        near("gradients ahead by the rank's own residual: within 1 % of dense", "ahead-own", DENSE, TARGET),
    ),
    "Momentum with Adam": (
        near("the recommended preset ends within 0.15 points or 1 % of dense", "recommended-adam", ADAM, TARGET),
        near("so it does with heavy-ball momentum", "heavy-adam", ADAM, TARGET),
        worse("top-k with momentum after the selection ends behind", "topka-adam", "momentum-adam"),
        worse("masking costs accuracy", "momentum-masked-adam", "momentum-adam"),
    ),
    "PowerSGD": (
        *(near(f"rank {rank} ends near dense", f"powersgd-{rank}", DENSE) for rank in POWERSGD_RANKS),
        *(
            claim
            for rank in (4, 8)
            for percent in (0.5, 0.3, 0.2)
            for rival, ours in [(f"powersgd-{rank}-nesterov", recommended_name(percent))]
            for claim in (
                worse(f"rank {rank} with Nesterov momentum ends behind {ours}", rival, ours),
                ratio(_LATE_BYTES, f"bytes of rank {rank} over those of {ours}", ours, rival),
            )
        ),
        worse("top-k at 1 % ends behind rank 4", "topka", "powersgd-4"),
        near("fp16 ends near dense", "fp16", DENSE),
    ),
    "Fully sharded": (
        *(
            near(f"{shown} ends within 2 % of FSDP2", f"{name}-8bit", FSDP)
            for shown, name in (
                ("4 %, parameters in 8 bits,", "sharded-4%"),
                ("4 % by the recommended preset, parameters in 8 bits,", "sharded-recommended-4%"),
            )
        ),
    ),
    "Learning rates": (
        near("1 % ends within 0.15 points or 1 % of dense Nesterov training", "recommended-tuned", TUNED, TARGET),
        near("with AdamW, 1 % ends within 2 % of dense", "recommended-adam-tuned", "dense-adam-tuned"),
        worse("PowerSGD with rank 4 ends behind 1 %", "powersgd-4-nesterov-tuned", "recommended-tuned"),
    ),
    "Muon": (
        near("updates at 1 % end within 2 % of the script's Muon", "local-1-muon-short", MUON),
        near("within 2 % of Muon with a shorter momentum, too", "local-1-muon-short", "dense-muon-short"),
        near("gradients in 2 bits end within 2 % of the latter", "muon-short-2bit", "dense-muon-short"),
    ),
    "Longer": (
        near("1 % ends within 1 % of dense Nesterov training", "recommended-4x", "dense-nesterov-4x", TARGET),
        near("so it does with heavy-ball momentum", "heavy-4x", "dense-4x", TARGET),
        worse("PowerSGD with rank 4 ends behind 1 % with heavy-ball momentum", "powersgd-4-4x", "heavy-4x"),
        near("Top-k at 1 % ends near dense", "topka-4x", "dense-4x"),
        worse("Ok-Topk at the same density ends worse than Stable Top-K", "oktopk-10%-4x", f"{_BEST}-4x"),
        near("error feedback ends near SGD", "randomblock-4x", "dense-plain-4x"),
    ),
}
