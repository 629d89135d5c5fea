"""Tables and figure of the decisions benchmark, from its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import markdown
from benchmarks.cluster.contenders import ALONE, PEERS
from benchmarks.cluster.network import bits_per_second, written
from horovod_sparse.cli.image import write_png

Record = Mapping[str, Any]
# Turns by contender and rate.
Cells = Mapping[tuple[str, str], Sequence[Record]]
Reported = Mapping[str, Callable[[Record], str]]

PRESET = "recommended"
SHARED_MEMORY = "memory"  # instead of a rate: all ranks on one node
_BEYOND = {"none": 3.0, SHARED_MEMORY: 10.0}  # places in the figure, over the highest rate


def tables(records: Sequence[Record]) -> str:
    """Return all records as Markdown tables under headings, model by model."""
    parts = []
    for model in dict.fromkeys(record["model"] for record in records):
        cells = _cells(records, model, "steps")
        if cells:
            parts += [f"## {model}: ms a step", steps_table(cells)]
            parts += [f"## {model}: ms a step more than `{ALONE}`", exposed_table(cells)]
        if cells := _cells(records, model, "accuracy"):
            parts += [f"## {model}: after the last step", accuracy_table(cells)]
        if cells := _cells(records, model, "change"):
            parts += [
                f"## {model}: links that change",
                change_table([turn for turns in cells.values() for turn in turns]),
            ]
    return "\n\n".join(parts)


def _cells(records: Sequence[Record], model: str, kind: str) -> Cells:
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if (record["model"], record["kind"]) == (model, kind):
            cells.setdefault((record["contender"], record["rate"]), []).append(record)
    return cells


def _rates(cells: Cells) -> list[str]:
    """Return the rates from the fastest link to the slowest."""
    rates = {rate for _, rate in cells}
    unlimited = [rate for rate in (SHARED_MEMORY, "none") if rate in rates]
    return [*unlimited, *sorted(rates.difference(unlimited), key=bits_per_second, reverse=True)]


def _table(
    cells: Cells, head: str, text: Callable[[str, str], str], more: Mapping[str, Callable[[Record], str]]
) -> str:
    """Return a table of all contenders over the rates, and below it what the preset reports of each turn."""
    rates = _rates(cells)
    rows = []
    for name in dict.fromkeys(name for name, _ in cells):
        texts = [text(name, rate) if (name, rate) in cells else "" for rate in rates]
        rows.append([name if name in PEERS else f"`{name}`", *texts])
    for label, number in more.items():
        if any((PRESET, rate) in cells for rate in rates):
            rows.append([label, *(", ".join(map(number, cells.get((PRESET, rate), ()))) for rate in rates)])
    return markdown([head, *map(_label, rates)], rows, left=1)


def spread(numbers: Sequence[float], form: str = "{:.1f}") -> str:
    """Return the median, and the least and the most of several numbers."""
    middle = form.format(median(numbers))
    return f"{middle} ({form.format(min(numbers))} to {form.format(max(numbers))})" if len(numbers) > 1 else middle


def steps_table(cells: Cells) -> str:
    """Return the milliseconds of a step; for the preset, also what it has chosen, when, and what is exposed."""
    more: Reported = {
        "density that it chose, by turn": lambda turn: f"{turn['density']:.2g}",
        "in step": lambda turn: str(turn["decided"]),
        "exposed, by its own count": lambda turn: f"{turn['exposed']:.1f}",
    }
    return _table(cells, "ms a step", lambda *key: spread([turn["milliseconds"] for turn in cells[key]]), more)


def exposed_table(cells: Cells) -> str:
    """Return the milliseconds that a step takes longer than computing alone, in the same turn."""
    alone = {
        (rate, turn["turn"]): turn["milliseconds"]
        for (name, rate), turns in cells.items()
        if name == ALONE
        for turn in turns
    }

    def exposed(name: str, rate: str) -> str:
        turns = [turn for turn in cells[name, rate] if (rate, turn["turn"]) in alone]
        return spread([turn["milliseconds"] - alone[rate, turn["turn"]] for turn in turns]) if turns else ""

    others = {key: turns for key, turns in cells.items() if key[0] != ALONE}
    return _table(others, "ms exposed", exposed, {})


def accuracy_table(cells: Cells) -> str:
    """Return the metric after the last step."""

    def final(name: str, rate: str) -> str:
        turns = cells[name, rate]
        if any(turn["final"] is None for turn in turns):
            return "diverged"
        return spread([turn["final"] for turn in turns], "{:.2%}" if turns[0]["metric"] == "accuracy" else "{:.1f}")

    (metric,) = {turn["metric"] for turns in cells.values() for turn in turns}
    return _table(cells, metric, final, {})


def change_table(turns: Sequence[Record]) -> str:
    """Return a row for each rate of each turn, with the steps of new decisions and what held at its end."""
    rows = []
    for turn in turns:
        for found in turn["rates"]:
            decided = ", ".join(map(str, found["decided"])) or "-"
            numbers = [f"{found['density']:.3g}", f"{found['milliseconds']:.1f}"]
            rows.append([str(turn["turn"]), _label(found["rate"]), decided, *numbers])
    return markdown(["turn", "link", "decided after, steps", "density", "ms a step"], rows, left=2)


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw step time over rate, a panel per model and a line per contender, and on a second axis the density chosen."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(record["model"] for record in records if record["kind"] == "steps"))
    if not models:
        return
    figure = Figure(figsize=(4.5 * len(models), 6), layout="constrained")
    panels = figure.subplots(2, len(models), squeeze=False, sharex="col", height_ratios=(3, 1))
    for model, axes, below in zip(models, *panels, strict=True):
        _draw(axes, below, _cells(records, model, "steps"))
        axes.set_title(model)
    panels[0][0].legend(fontsize=7)
    write_png(figure, path)


def _draw(axes: Any, below: Any, cells: Cells) -> None:
    from matplotlib.ticker import LogLocator

    rates = _rates(cells)
    highest = max((bits_per_second(rate) for rate in rates if rate not in _BEYOND), default=1e9)
    place = {rate: _BEYOND[rate] * highest if rate in _BEYOND else bits_per_second(rate) for rate in rates}
    for name in dict.fromkeys(name for name, _ in cells):
        mine = [rate for rate in rates if (name, rate) in cells]
        times = [[turn["milliseconds"] for turn in cells[name, rate]] for rate in mine]
        middles = [median(of_turns) for of_turns in times]
        errors = [
            [middle - min(of_turns) for middle, of_turns in zip(middles, times, strict=True)],
            [max(of_turns) - middle for middle, of_turns in zip(middles, times, strict=True)],
        ]
        # Wide and pale beneath the others, as it coincides with the density that it chose.
        style = {"color": "black", "linewidth": 5, "alpha": 0.35, "zorder": 1} if name == PRESET else {"linewidth": 1.2}
        x = [place[rate] for rate in mine]
        axes.errorbar(x, middles, errors, marker="o", markersize=3, capsize=2, label=name, **style)
    for rate in rates:
        densities = [turn["density"] for turn in cells.get((PRESET, rate), ())]
        below.plot([place[rate]] * len(densities), densities, "o", markersize=4, color="black")
    for one in (axes, below):
        one.set(xscale="log", yscale="log")
        one.set_xticks([place[rate] for rate in rates], [_label(rate) for rate in rates], rotation=45)
        one.minorticks_off()
        one.grid(alpha=0.25)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(ylabel="ms per step: median, least and most")
    below.set(xlabel="links", ylabel="density chosen", ylim=(7e-4, 1.5))
    below.set_yticks([0.001, 0.01, 0.1, 1], ["0.1 %", "1 %", "10 %", "100 %"])


def _label(rate: str) -> str:
    return {"none": "no limit", SHARED_MEMORY: "shared memory"}.get(rate, written(rate))
