"""Published orderings of the compressions, to be checked against what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.convergence.results import Results
from benchmarks.convergence.runs import DENSE


@dataclass(frozen=True)
class Verdict:
    """Verdict on a claim for one task, and the numbers that it rests on."""

    holds: bool
    numbers: str


NEAR = 5.0  # percent; the published runs are much longer, and end nearer

Check = Callable[[Results, str], Verdict]


@dataclass(frozen=True)
class Claim:
    """A published ordering.

    Attributes:
        name: The ordering in words.
        runs: Names of the runs that it is about.
        check: Compares them on a task where all of them and their dense baselines were measured.
    """

    name: str
    runs: Sequence[str]
    check: Check


def near(run: str, other: str, within: float) -> Check:
    """A check that a run is at most ``within`` percent worse than another (see ``Results.loss``)."""

    def check(results: Results, task: str) -> Verdict:
        one, two = results.loss(task, run), results.loss(task, other)
        return Verdict(one - two <= within, _losses({run: one, other: two}))

    return check


def worse(run: str, than: str, by: float) -> Check:
    """A check that a run is more than ``by`` percent worse than another, for the best seed against the worst too."""

    def check(results: Results, task: str) -> Verdict:
        one, two = results.loss(task, run), results.loss(task, than)
        return Verdict(one - two > by, _losses({run: one, than: two}))

    return check


def fewer_bytes(run: str, than: str, factor: float) -> Check:
    """A check that a run sends at least ``factor`` times fewer bytes than another."""

    def check(results: Results, task: str) -> Verdict:
        found = results.bytes_per_step(task, than) / results.bytes_per_step(task, run)
        return Verdict(found >= factor, f"{found:.1f} times fewer")

    return check


def _losses(losses: dict[str, float]) -> str:
    return ", ".join(f"{run} {loss:+.1f} %" for run, loss in losses.items())


CLAIMS = (
    Claim("Top-k at 1 % ends near dense (Lin et al. 2018)", ["topka"], near("topka", DENSE, within=NEAR)),
    Claim(
        "without feedback, top-k ends worse than with it (Stich et al. 2018)",
        ["topka", "topka-nofeedback"],
        worse("topka-nofeedback", than="topka", by=1),
    ),
    Claim("gTop-k ends near top-k (Shi et al. 2019)", ["gtopk", "topka"], near("gtopk", "topka", within=NEAR)),
    Claim("Ok-Topk ends near top-k (Li and Hoefler 2022)", ["oktopk", "topka"], near("oktopk", "topka", within=NEAR)),
    Claim(
        "gTop-k sends fewer bytes than TopkA (Shi et al. 2019)",
        ["gtopk", "topka"],
        fewer_bytes("gtopk", "topka", factor=1.2),
    ),
    Claim(
        "values in bfloat16 lose nothing against float32, in 3/4 of the bytes (ours)",
        ["topka-bfloat16", "topka"],
        near("topka-bfloat16", "topka", within=1),
    ),
    *(
        Claim(f"the threshold of {run} ends near top-k", [run, "topka"], near(run, "topka", within=NEAR))
        for run in ("gaussiank", "redsync", "dgc")
    ),
    Claim(
        "random-k without feedback ends clearly worse than with it (Yoon and Oh 2022; ConEF)",
        ["randomk", "randomk-nofeedback"],
        worse("randomk-nofeedback", than="randomk", by=5),
    ),
    Claim(
        "random blocks without feedback end clearly worse than with it (ConEF)",
        ["randomblock", "randomblock-nofeedback"],
        worse("randomblock-nofeedback", than="randomblock", by=5),
    ),
    *(
        Claim(
            f"ConEF with {saved} of the memory saved ends near error feedback (ConEF)",
            [run, "randomblock"],
            near(run, "randomblock", within=NEAR),
        )
        for run, saved in (("conef-60", "60 %"), ("conef-90", "90 %"), ("conef-4bit", "87 % (4 bits)"))
    ),
    Claim(
        "Stable Top-K ends near dense where block and refresh are right (Stable Top-K)",
        ["stable-b16-r5"],
        near("stable-b16-r5", DENSE, within=NEAR),
    ),
    Claim(
        "a block that is too small ends worse (Stable Top-K)",
        ["stable-b1", "stable-b16"],
        worse("stable-b1", than="stable-b16", by=0),
    ),
    Claim(
        "too rare a refresh ends worse (Stable Top-K)",
        ["stable-b16-r100", "stable-b16"],
        worse("stable-b16-r100", than="stable-b16", by=1),
    ),
    Claim("GraVAC ends near dense (Tyagi and Swany 2023)", ["gravac"], near("gravac", DENSE, within=NEAR)),
    Claim(
        "GraVAC sends far fewer bytes than dense (Tyagi and Swany 2023: 13 to 289 times)",
        ["gravac"],
        fewer_bytes("gravac", DENSE, factor=5),
    ),
    Claim(
        "GraVAC sends fewer bytes than its lowest factor of 10, fixed",
        ["gravac", "fixed-10"],
        fewer_bytes("gravac", "fixed-10", factor=1.2),
    ),
    Claim(
        "a fixed factor of 1000 ends worse than GraVAC (Tyagi and Swany 2023)",
        ["fixed-1000", "gravac"],
        worse("fixed-1000", than="gravac", by=1),
    ),
    Claim(
        "GraVAC sends fewer bytes than Accordion (Tyagi and Swany 2023: 22 to 104 times)",
        ["gravac", "accordion"],
        fewer_bytes("gravac", "accordion", factor=1),
    ),
)


def orderings(results: Results, claims: Sequence[Claim] = CLAIMS) -> str:
    """Each claim and, for each task on which it can be checked, whether it holds there, as Markdown."""
    return "\n".join(["## Published orderings", "", *(_item(results, claim) for claim in claims)])


def _item(results: Results, claim: Claim) -> str:
    tasks = [
        task
        for task in results.tasks
        if all(results.of(task, run) and results.baseline(task, run) for run in claim.runs)
    ]
    if not tasks:
        return f"- {claim.name}: not measured"
    lines = [f"- {claim.name}:"]
    for task in tasks:
        verdict = claim.check(results, task)
        lines.append(f"  - {task}: {'holds' if verdict.holds else 'DOES NOT HOLD'} ({verdict.numbers})")
    return "\n".join(lines)
