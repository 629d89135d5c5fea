"""Report of the convergence benchmark: a table and verdicts for each source, and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks import markdown
from benchmarks.convergence.claims import CLAIMS, Claim, Verdict
from benchmarks.convergence.figures import plot_grid, plot_local_steps, plot_overview
from benchmarks.convergence.results import Interval, Record, Results, read_records, records_path
from benchmarks.convergence.runs import (
    BETAS,
    CONFIRMATION,
    DENSE,
    FORM_PERCENTS,
    FORMS,
    FRESH,
    LOCAL_TUNED,
    OWN,
    PARTIAL,
    RANKS,
    RUNS,
    SIZES,
    SMALL,
    STDLIB,
    TEN_MILLION,
    form_name,
    own,
    partial_name,
)
from benchmarks.convergence.summaries import SUMMARIES

_NOTHING = "Not measured yet."
_ALONE = (
    "No published dense training has the same task, number of steps and number of ranks: train it into the same "
    "folder, with `--runs dense` in place of `--compression`."
)
_PUBLISHED = records_path(Path(__file__).resolve().parents[2] / "docs" / "data")
_NAMED, _REFERENCES = frozenset(RUNS), (DENSE, "topka")  # the latter to compare own configurations with
# Markers of a page, around the report of a source.
_BEGIN, _END = "<!-- begin {} -->", "<!-- end {} -->"


def report(folder: Path, pages: Sequence[Path] = (), against: Sequence[str] = ()) -> str:
    """Write the tables and the figures of a folder's records; return the tables.

    Args:
        folder: Folder of ``records.jsonl``. Receives the figures; the small tasks' only if there are no others.
        pages: Pages that receive the tables, between the markers of each source; empty: ``report.md`` in the folder.
        against: Published runs to compare the user's own configurations with, besides dense training and top-k.

    Raises:
        ValueError: The folder has no records, or the pages lack the markers of a source.
    """
    path = records_path(folder)
    records = read_records(path)
    if not records:
        raise ValueError(f"{path} holds no records: run `python -m benchmarks.convergence` first")
    results = Results(records + compared(records, against))
    parts = sections(results, against)
    text = "\n\n".join(f"## {source}\n\n{part}" for source, part in parts.items() if part != _NOTHING) + "\n"
    if pages:
        for page, content in zip(
            pages, filled([page.read_text() for page in pages], parts | summaries(results)), strict=True
        ):
            page.write_text(content)
    else:
        (folder / "report.md").write_text(text)
    decisive = [task for task in results.tasks if task not in (*SMALL, CONFIRMATION)] or results.tasks
    for task in filter(results.runs, decisive):
        plot_overview(results, task, folder / f"{task}.png")
    plot_grid(results, folder / "grid.png")
    if any(run.group == LOCAL_TUNED and results.of(STDLIB, name) for name, run in RUNS.items()):
        panels = {STDLIB: results}
        if wider := read_records(records_path(folder / "wider")):
            panels[TEN_MILLION] = Results(wider).at_best_rates(TEN_MILLION)
        plot_local_steps(panels, folder / "local-steps.png")
    return text


def compared(records: Sequence[Record], against: Sequence[str] = ()) -> list[Record]:
    """Return the published records to compare with the user's own configurations, if any: same tasks and lengths."""
    mine = [record for record in records if record["run"] == record.get("spec") and record["run"] not in _NAMED]
    for record in mine:
        own(record["spec"])
    cases, known = set(map(_case, mine)), {(record["task"], record["run"]) for record in records}
    return [
        record
        for record in (read_records(_PUBLISHED) if mine else ())
        if record["run"] in {*_REFERENCES, *against}
        and _case(record) in cases
        and (record["task"], record["run"]) not in known
    ]


def _case(record: Record) -> tuple[str, int, int]:
    return record["task"], record["steps"], record.get("ranks", RANKS)


def filled(pages: Sequence[str], parts: dict[str, str]) -> list[str]:
    """Return pages with the text between the markers of each part replaced.

    Raises:
        ValueError: No page has the markers of a part, or several have.
    """
    texts = list(pages)
    for source, part in parts.items():
        begin, end = _BEGIN.format(source), _END.format(source)
        places = [number for number, text in enumerate(texts) if begin in text and end in text]
        if len(places) != 1:
            raise ValueError(f"{len(places)} pages have a place for {source!r}: put {begin!r} and {end!r} into one")
        text = texts[places[0]]
        texts[places[0]] = f"{text[: text.index(begin)]}{begin}\n\n{part}\n\n{text[text.index(end) :]}"
    return texts


def sections(results: Results, against: Sequence[str] = ()) -> dict[str, str]:
    """Return the report of each source, as Markdown."""
    sources = list(dict.fromkeys([run.group for run in RUNS.values()]))
    parts = {}
    for source in sources:
        claims = CLAIMS.get(source, ())
        names = {run.name for run in RUNS.values() if run.group == source}.union(*(claim.runs for claim in claims))
        names |= {*_REFERENCES, *against} if source == OWN else set()
        names |= {RUNS[name].baseline for name in names} - {DENSE}
        shown = [run for run in RUNS if run in names and any(results.of(task, run) for task in results.tasks)]
        if not any(RUNS[run].group == source for run in shown):
            parts[source] = _NOTHING
        elif source == PARTIAL:
            parts[source] = partial_table(results)
        elif source == FORMS:
            parts[source] = forms_table(results)
        else:
            alone = _ALONE if source == OWN and DENSE not in shown else ""
            parts[source] = "\n\n".join(filter(None, [table(results, shown), verdicts(results, claims), alone]))
    return parts


def summaries(results: Results) -> dict[str, str]:
    """Return a short table of each source that has one, without settings, memory and time, as Markdown."""
    return {
        f"{source}, in short": table(results, runs, settings=False) or _NOTHING for source, runs in SUMMARIES.items()
    }


def table(results: Results, runs: Sequence[str], settings: bool = True) -> str:
    """Return runs as a Markdown table, with three columns for each task that has any of them besides baselines.

    Args:
        results: The results.
        runs: Names of the runs, one row each.
        settings: Whether the table shows the compression, the residual's size and the time, too.
    """
    compared = [run for run in runs if RUNS[run].baseline != run] or runs
    tasks = [task for task in results.tasks if any(results.of(task, run) for run in compared)]
    made = [run for run in runs if any(results.of(task, run) for task in tasks)]
    if not made:
        return ""
    metrics = {task: next(record["metric"] for record in results.records if record["task"] == task) for task in tasks}
    columns = [head for task in tasks for head in (f"{task}: {metrics[task]}", "to dense", "bytes")]
    if not settings:
        return markdown(["run", *columns], [[run, *_cells(results, tasks, run)] for run in made])
    heads = ["run", "compression", *columns, "residual", "ms"]
    return markdown(heads, [_row(results, tasks, run) for run in made], left=2)


def _cells(results: Results, tasks: Sequence[str], run: str) -> list[str]:
    cells: list[str] = []
    for task in tasks:
        cells += (*_metric(results, task, run), _bytes(results, task, run)) if results.of(task, run) else ("", "", "")
    return cells


def _row(results: Results, tasks: Sequence[str], run: str) -> list[str]:
    spec = next(results.of(task, run)[0]["spec"] for task in tasks if results.of(task, run))
    of_torch = spec.startswith("powersgd:")  # not in the syntax of hvs.parse
    setting = f"torch's hook, {spec.partition(':')[2]}" if of_torch else f"`{spec}`"
    # Memory and time are those of the first task that has the run: the models have similar sizes.
    task = next(task for task in tasks if results.of(task, run))
    kept, times = results.of(task, run)[0]["residual_bytes"], results.milliseconds(task, run)
    return [
        run,
        setting,
        *_cells(results, tasks, run),
        f"{kept / 1e3:,.0f} KB",
        f"{times['select'] + times['apply']:.1f}" if times["select"] else "",
    ]


def _metric(results: Results, task: str, run: str) -> tuple[str, str]:
    """Return the metric and the loss against the dense baseline, as text."""
    records, diverged = results.of(task, run), results.diverged(task, run)
    if diverged:
        return f"diverged ({diverged} of {len(records)})", ""
    finals = [*results.finals(task, run).values()]
    value = f"{100 * mean(finals):.2f} %" if records[0]["metric"] == "accuracy" else f"{mean(finals):.2f}"
    return f"{value} ({len(records)})", "" if RUNS[run].baseline == run else _loss(results.loss(task, run))


def _bytes(results: Results, task: str, run: str) -> str:
    reduction = results.reduction(task, run)
    return "" if math.isnan(reduction) else f"1/{reduction:.1f}"


def _loss(loss: Interval) -> str:
    if not loss.seeds:
        return ""
    return f"{loss.middle:+.2f}" + ("" if math.isinf(loss.error) else f" ± {loss.error:.2f}")


def verdicts(results: Results, claims: Sequence[Claim]) -> str:
    """Return claims as a Markdown table: each verdict with the figures behind it."""
    found = {claim.name: on for claim in claims if (on := dict(claim.verdicts(results)))}
    tasks = [task for task in results.tasks if any(task in on for on in found.values())]
    if not tasks:
        return ""
    rows = [[name, *(_verdict(on[task]) if task in on else "" for task in tasks)] for name, on in found.items()]
    return markdown(["claim", *tasks], rows, left=1 + len(tasks))


def _verdict(verdict: Verdict) -> str:
    return f"**{verdict.word}** ({verdict.numbers})" if verdict.word else verdict.numbers


def partial_table(results: Results) -> str:
    """Return the accuracy on digits for every part of the error that is not fed back and every sketch size."""
    rows = {
        f"β = {beta:g}" if beta else "nothing (ConEF)": [partial_name(beta, size) for size in SIZES] for beta in BETAS
    }
    return _metrics(results, "digits", ["not fed back", *(f"{size:.0%}" for size in SIZES)], rows)


def forms_table(results: Results) -> str:
    """Return the perplexity of the language model for every density and every form of momentum."""
    rows = {f"{percent:g} %": [form_name(fresh, percent) for fresh in FRESH] for percent in FORM_PERCENTS}
    return _metrics(results, STDLIB, ["density", *(f"f = {fresh:g}" for fresh in FRESH)], rows)


def _metrics(results: Results, task: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table with the metric of one run in each cell."""
    cells = {
        head: [_metric(results, task, name)[0] if results.of(task, name) else "" for name in names]
        for head, names in rows.items()
    }
    return markdown(heads, [[head, *row] for head, row in cells.items()])
