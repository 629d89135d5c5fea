"""Table of the runs of one or several folders: bytes and held-out loss at equal tokens, against dense training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.gpt2.exchanges import ring
from benchmarks.gpt2.training import RECORDS

FACTS = "facts.json"  # settings of a run, the text, the machine and the versions
_APART = {"exchange", "seed", "lr", "every"}  # settings in which runs of a table may differ
_HEADS = ("exchange", "lr", "seed", "kB per step and rank", "of dense", "tokens", "loss", "to dense", "s per step")

Run = dict[str, Any]


def report(folders: Iterable[Path]) -> tuple[str, dict[str, Any]]:
    """Return a table for each model, text and machine, and the same as JSON.

    Losses are those on the held-out part, at the last step that all runs of the table have reached.

    Raises:
        ValueError: There are no records.
    """
    tables: dict[str, list[Run]] = {}
    for path in sorted({path for folder in folders for path in folder.rglob(RECORDS)}):
        facts = json.loads((path.parent / FACTS).read_text())
        curve = [json.loads(line) for line in path.read_text().splitlines()]
        if curve:
            common = {key: facts[key] for key in facts if key not in _APART}
            tables.setdefault(json.dumps(common), []).append({**facts, "curve": curve})
    if not tables:
        raise ValueError("the folders hold no records")
    found = [{**json.loads(common), "runs": rows(runs)} for common, runs in tables.items()]
    return "\n\n".join(map(_table, found)), {"tables": found}


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the outcome of each run at the last step that all have reached; runs have the same model and text."""
    common = set.intersection(*({point["step"] for point in run["curve"]} for run in runs))
    step = max(common, default=0)
    outcomes = []
    for run in runs:
        at = next((point for point in run["curve"] if point["step"] == step), run["curve"][-1])
        sent = at["bytes_sent"] / at["step"]
        outcome = {name: run[name] for name in ("exchange", "lr", "seed")}
        outcome |= {"bytes_per_step": sent, "of_dense": sent / max(1.0, ring(4 * run["parameters"], run["ranks"]))}
        outcome |= {"tokens": at["tokens"], "held_out_loss": at["held_out_loss"]}
        outcomes.append({**outcome, "seconds_per_step": at["seconds"] / at["step"]})
    dense = {(run["seed"], run["tokens"]): run["held_out_loss"] for run in outcomes if run["exchange"] == "dense"}
    for outcome in outcomes:
        baseline = dense.get((outcome["seed"], outcome["tokens"]))
        outcome["to_dense"] = None if baseline is None else outcome["held_out_loss"] - baseline
    return outcomes


def _table(found: dict[str, Any]) -> str:
    size = f"{found['parameters'] / 1e6:.1f}M parameters, {found['ranks']} ranks of {found['sequences']} sequences"
    text = f"{found['train_tokens'] / 1e6:.1f}M tokens ({found['tokenizer']}, vocabulary {found['vocabulary']})"
    machine = f"{found['machine']}, torch {found['torch']}"
    lines = [
        (
            row["exchange"],
            f"{row['lr']:g}",
            str(row["seed"]),
            f"{row['bytes_per_step'] / 1e3:.1f}",
            f"{100 * row['of_dense']:.2f} %",
            f"{row['tokens'] / 1e6:.2f}M",
            f"{row['held_out_loss']:.4f}",
            "" if row["to_dense"] is None else f"{row['to_dense']:+.4f}",
            f"{row['seconds_per_step']:.3f}",
        )
        for row in found["runs"]
    ]
    return f"{found['model']}: {size}; {text}; {machine}\n\n{markdown(_HEADS, lines)}"
