"""Tables and figure of `benchmarks.convergence.scaling`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from benchmarks import markdown
from benchmarks.convergence.report import filled
from benchmarks.convergence.results import Interval, Record, Results
from benchmarks.convergence.runs import ADAM, DENSE, STDLIB, Job
from horovod_sparse.cli.image import write_png

NESTEROV, PRESET, TOPKA = "dense-nesterov", "recommended-oktopk", "recommended"


class _Shown(NamedTuple):
    """Name and marker of a contender."""

    name: str
    marker: str


_SHOWN = {
    NESTEROV: _Shown("dense, Nesterov momentum", "*"),
    DENSE: _Shown("dense, heavy-ball momentum", "P"),
    ADAM: _Shown("dense", "*"),
    PRESET: _Shown("preset with Ok-Topk", "o"),
    TOPKA: _Shown("preset with TopkA", "s"),
    "recommended-oktopk-published": _Shown("Ok-Topk as published", "v"),
    "recommended-gtopk": _Shown("gTopk", "D"),
    "recommended-spardl": _Shown("SparDL", "X"),
}
_JOINED = (NESTEROV, ADAM, TOPKA, f"{TOPKA}-adam", PRESET, f"{PRESET}-adam")  # what the preset chooses from
_COLOURS = {4: "C0", 16: "C1", 64: "C3"}
_OPTIMIZERS = ("SGD", "AdamW")
_SHARES = (1, 3, 10, 30, 100, 300, 1000)  # of the axis: 1/1, 1/3, ...
_PERCENTS = (-5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100)


class Row(NamedTuple):
    """Outcome of a contender on a task and a number of ranks, over its seeds."""

    metric: str
    finals: Sequence[float]  # of the seeds that did not diverge: perplexity, or error in percent
    seeds: int
    behind: Interval  # dense training, in percent of perplexity or points; infinite if a seed diverged
    megabytes: float  # that a rank sent
    share: float  # of the bytes of dense training; NaN if no seed reached an evaluation


def write(wanted: Sequence[Job], records: Sequence[Record], folder: Path, pages: Sequence[Path]) -> str:
    """Write tables and figure of the jobs that have records; return the tables.

    Args:
        wanted: The jobs.
        records: Records, of other trainings, too.
        folder: Folder that receives the figure.
        pages: Pages that receive the tables, between their markers; empty: ``report.md`` in the folder.

    Raises:
        ValueError: No job has a record, or the pages lack the markers.
    """
    results = by_ranks(wanted, records)
    if not results:
        raise ValueError("no training has a record yet")
    text = tables(results)
    if pages:
        for page, content in zip(pages, filled([page.read_text() for page in pages], {"scaling": text}), strict=True):
            page.write_text(content)
    else:
        (folder / "report.md").write_text(text + "\n")
    plot(results, folder / "scaling.png")
    return text


def by_ranks(wanted: Sequence[Job], records: Sequence[Record]) -> dict[int, Results]:
    """Return the records of jobs by their number of ranks, under the names of the runs at the task's rate."""
    found: dict[int, list[Record]] = {}
    for job in wanted:
        record = next((record for record in records if job.made(record)), None)
        if record is not None:
            found.setdefault(job.ranks, []).append({**record, "run": job.run.name.partition("@")[0]})
    return {ranks: Results(found[ranks]) for ranks in sorted(found)}


def tables(results: dict[int, Results]) -> str:
    """Return a Markdown table for each number of ranks."""
    return "\n\n".join(f"**{ranks} ranks**\n\n{_table(found, ranks)}" for ranks, found in results.items())


def _table(results: Results, ranks: int) -> str:
    heads, rows = ["optimizer", "exchange"], {}
    for task in results.tasks:
        metric = "perplexity" if task == STDLIB else "error"
        heads += [f"{task}: {metric}", "behind dense", "MB sent", "bytes"]
    for optimizer in _OPTIMIZERS:
        for name, shown in contenders(optimizer).items():
            found = [row(results, task, name, ranks) for task in results.tasks]
            if any(found):
                rows[optimizer, shown.name] = [cell for one in found for cell in _cells(one, name in (NESTEROV, ADAM))]
    return markdown(heads, [[*head, *cells] for head, cells in rows.items()], left=2)


def contenders(optimizer: str) -> dict[str, _Shown]:
    """Return the contenders with an optimizer by the names of their runs, the dense baseline first."""
    if optimizer == "SGD":
        return {name: shown for name, shown in _SHOWN.items() if name != ADAM}
    return {
        name if name == ADAM else f"{name}-adam": shown
        for name, shown in _SHOWN.items()
        if name not in (NESTEROV, DENSE)
    }


def row(results: Results, task: str, name: str, ranks: int) -> Row | None:
    """Return the outcome of a run on a task; None if it has no record."""
    records = results.of(task, name)
    if not records:
        return None
    finals = results.finals(task, name).values()
    metric = records[0]["metric"]
    dense = 8 * records[0]["parameters"] * (ranks - 1) / ranks  # bytes of a ring in float32
    return Row(
        metric,
        [100 * (1 - final) if metric == "accuracy" else final for final in finals],
        len(records),
        results.loss(task, name, ADAM if name.endswith("-adam") else NESTEROV),
        mean(record["bytes_sent"] for record in records) / 1e6,
        results.bytes_per_step(task, name) / dense,
    )


def _cells(found: Row | None, baseline: bool) -> list[str]:
    if found is None:
        return [""] * 4
    share = "" if math.isnan(found.share) else f"1/{1 / found.share:.1f}"
    if len(found.finals) < found.seeds:
        return [f"diverged ({found.seeds - len(found.finals)} of {found.seeds})", "", "", share]
    unit = " %" if found.metric == "accuracy" else ""
    value = _with_error(Interval.of(found.finals), ".2f")
    behind = _with_error(found.behind, "+.2f") if found.behind.seeds and not baseline else ""
    return [f"{value}{unit} ({found.seeds})", behind, f"{found.megabytes:,.0f}", share]


def _with_error(interval: Interval, form: str) -> str:
    return f"{interval.middle:{form}}" + ("" if math.isinf(interval.error) else f" ± {interval.error:.2f}")


def plot(results: dict[int, Results], path: Path) -> None:
    """Draw how far the language model ends behind dense training over the bytes sent in a PNG.

    A panel for each optimizer, a marker for each contender. A line for each number of ranks joins what the preset
    chooses from. Bars are standard errors.
    """
    figure, drawn = Figure(figsize=(10, 5.4), layout="constrained"), set[str]()  # markers
    for axes, optimizer in zip(figure.subplots(1, 2), _OPTIMIZERS, strict=True):
        for ranks, found in results.items():
            drawn |= draw(axes, found, optimizer, ranks)
        _scale(axes)
        axes.set(title=f"Language model, {optimizer}", xlabel="bytes that a rank sends, relative to dense")
        axes.set_ylabel(f"perplexity behind dense{', Nesterov momentum' if optimizer == 'SGD' else ''}")
    marks: list[tuple[str, dict[str, Any]]]
    marks = [(name, {"marker": marker}) for name, marker in contenders("SGD").values() if marker in drawn]
    if any(found.diverged(STDLIB, record["run"]) for found in results.values() for record in found.records):
        marks.append(("at the top: diverged", {"marker": "o", "fillstyle": "none"}))
    handles = [Line2D([], [], color=_COLOURS[ranks], linewidth=2, label=f"{ranks} ranks") for ranks in results]
    handles += [Line2D([], [], color="black", linestyle="", label=name, **style) for name, style in marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    write_png(figure, path)


def _scale(axes: Axes) -> None:
    """Make both axes logarithmic, the vertical one linear up to 2 %, where the differences that matter are."""
    axes.set_xscale("log")
    axes.set_xticks([1 / share for share in _SHARES], [f"1/{share}" if share > 1 else "1" for share in _SHARES])
    axes.set_yscale("symlog", linthresh=2, linscale=0.7)
    axes.set_yticks(_PERCENTS, [f"{percent} %" for percent in _PERCENTS])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.margins(0.08, 0.12)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.grid(alpha=0.25)


def draw(axes: Axes, results: Results, optimizer: str, ranks: int) -> set[str]:
    """Draw the contenders on a number of ranks, those of which a seed diverged hollow, at the upper edge.

    Returns:
        Their markers.
    """
    line, drawn = [], set()
    for name, shown in contenders(optimizer).items():
        found = row(results, STDLIB, name, ranks)
        if found is None or math.isnan(found.share + found.behind.middle):
            continue
        drawn.add(shown.marker)
        style: dict[str, Any] = {"color": _COLOURS[ranks], "marker": shown.marker, "markersize": 8}
        if math.isinf(found.behind.middle):
            axes.plot(found.share, 0.96, linestyle="", fillstyle="none", transform=axes.get_xaxis_transform(), **style)
            continue
        error = found.behind.error if math.isfinite(found.behind.error) else 0.0
        axes.errorbar(found.share, found.behind.middle, error, capsize=3, elinewidth=1, **style)
        if name in _JOINED:
            line.append((found.share, found.behind.middle))
    if line:
        axes.plot(*zip(*sorted(line), strict=True), color=_COLOURS[ranks], linewidth=1.2, alpha=0.6, zorder=1)
    return drawn
