"""Runner of the benchmarks: measures contenders in cells, in turns, and keeps the measurements as JSON lines.

A benchmark is a list of contenders, a list of cells and a function that measures a contender in a cell. In each cell,
contenders take turns, as the machine may be shared. With --output, a benchmark that was interrupted continues, also
with more turns, cells or contenders.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

from horovod_sparse.cli.units import at_least

Record = dict[str, Any]
Turns = Sequence[Record]
# Turns by contender.
Found = Mapping[str, Turns]
# Measures a contender once; the result has a number `wrong` if it was verified.
Measure = Callable[[str], Record]
# Text in a table's column, from the turns of a row's contender.
Column = Callable[[Turns], str]


class Records:
    """Measurements in a file of JSON lines, one for each line, or only in memory.

    Args:
        path: The file, which is created with its folder; a last line that an interruption has cut is removed. None:
            nothing is read or written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.lines: list[Record] = []
        if path and path.exists():
            complete, _, cut = path.read_text().rpartition("\n")
            if cut:
                path.write_text(f"{complete}\n" if complete else "")
            self.lines = [json.loads(line) for line in complete.splitlines()]

    def find(self, key: Mapping[str, Any]) -> Record | None:
        """Return the measurement that has all values of a key, or None."""
        return next((line for line in self.lines if key.items() <= line.items()), None)

    def missing(self, keys: Iterable[Record]) -> list[Record]:
        """Return the keys of measurements that are still to be made."""
        return [key for key in keys if self.find(key) is None]

    def add(self, key: Record, found: Record) -> None:
        """Append the measurement of a key."""
        self.lines.append({**key, **found, **key})  # first in the line, and not overwritten
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(self.lines[-1]) + "\n")


def add_arguments(parser: argparse.ArgumentParser, contenders: Sequence[str], turns: int) -> None:
    """Add the arguments that all benchmarks have, with the default contenders and number of turns."""
    add = parser.add_argument
    add("--contenders", nargs="+", default=[*contenders], metavar="NAME", help="what to compare; default: %(default)s")
    add("--turns", type=at_least(1), default=turns, help="measurements of each contender; default: %(default)s")
    add("--output", type=Path, metavar="FILE", help="JSON lines of the measurements; those in it are not repeated")


def choose(parser: argparse.ArgumentParser, options: argparse.Namespace, known: Iterable[str]) -> None:
    """Refuse unknown contenders; without any, take all that are known."""
    names = [*known]
    if unknown := [name for name in options.contenders if name not in names]:
        parser.error(f"unknown contenders {', '.join(unknown)}; known are: {', '.join(names)}")
    options.contenders = options.contenders or names


def run(
    options: argparse.Namespace,
    cells: Iterable[Record],
    open_cell: Callable[..., AbstractContextManager[Measure]],
    show: Callable[[Found], str],
    rank: int = 0,
    broadcast: Callable[[Any], Any] = lambda content: content,
) -> int:
    """Measure what is not in the output yet, and print the table of each cell.

    Args:
        options: Values of the arguments that ``add_arguments`` has added.
        cells: Settings of each cell: all that its results depend on, besides the contender.
        open_cell: Prepares a cell, called with its settings as keywords, if any of its measurements is missing.
        show: Returns the table of a cell.
        rank: This process, if several run the benchmark together; only rank 0 reads, writes and prints.
        broadcast: Returns the argument of rank 0 on all ranks.

    Returns:
        1 if any result was wrong, else 0.
    """
    records = Records(options.output if rank == 0 else None)
    wrong = 0
    for cell in cells:
        turns = itertools.product(range(options.turns), options.contenders)
        keys = [{**cell, "contender": name, "turn": turn} for turn, name in turns]
        if missing := broadcast(records.missing(keys)):
            with open_cell(**cell) as measure:
                for key in missing:
                    records.add(key, measure(key["contender"]))
        if rank == 0:
            found: dict[str, list[Record]] = {name: [] for name in options.contenders}
            for key in keys:
                found[key["contender"]].append(records.find(key) or {})
            wrong += sum(bool(turn.get("wrong")) for turns_of in found.values() for turn in turns_of)
            print("", ", ".join(f"{name} {value}" for name, value in cell.items()), show(found), sep="\n", flush=True)
    return int(broadcast(wrong) > 0)


def table(head: str, found: Found, columns: Mapping[str, Column]) -> str:
    """Return a table with a row for each contender, and columns of equal width."""
    rows = [[name, *(column(turns) for column in columns.values())] for name, turns in found.items()]
    widths = [max(map(len, texts)) for texts in zip([head, *columns], *rows, strict=True)]
    first, *others = widths
    return "\n".join(
        "  ".join([row[0].ljust(first), *(text.rjust(width) for text, width in zip(row[1:], others, strict=True))])
        for row in ([head, *columns], *rows)
    )


def values(turns: Turns, name: str) -> list[Any]:
    """Return a value of each turn; those of a turn that has several are joined."""
    found = [turn[name] for turn in turns]
    return list(itertools.chain.from_iterable(found)) if isinstance(found[0], list) else found


def column(name: str, form: str = ".2f", of: Callable[[list[Any]], Any] = median) -> Column:
    """Return a column with a value of the turns, empty where a contender has none."""

    def text(turns: Turns) -> str:
        found = [value for value in values(turns, name) if value is not None]
        return format(of(found), form) if found else ""

    return text


def spread(name: str, form: str = ".1f") -> dict[str, Column]:
    """Return columns with median, least and most of a value over the turns."""
    return {"median": column(name, form), "least": column(name, form, min), "most": column(name, form, max)}


def times(found: Found, bound: str, form: str = ".3f") -> dict[str, Column]:
    """Return columns of the milliseconds `ms`: least, median, and the least as a multiple of that of a contender."""
    columns = {"min ms": column("ms", form, min), "median ms": column("ms", form)}
    if bound in found:
        least = min(values(found[bound], "ms"))
        columns[f"/ {bound}"] = lambda turns: f"{min(values(turns, 'ms')) / least:.2f}"
    return columns


def program(function: str, *arguments: Any) -> list[str]:
    """Return Python's arguments to call a function on each rank and to print rank 0's result in the last line.

    Args:
        function: Module and name, as in ``benchmarks.cluster.peers:contender``.
        arguments: The function's arguments, as JSON.
    """
    return ["-m", "mpi4py", "-m", "benchmarks.runner", function, json.dumps(arguments)]  # a failing rank ends all


def last_line(output: str) -> Any:
    """Return the result in the last line of a program's output, as other lines may be warnings."""
    return json.loads(output.splitlines()[-1])


def main(function: str, arguments: str) -> None:
    """Call a function on this rank, and print its result on rank 0."""
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    from mpi4py import MPI  # after Horovod, which may have started MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        print(json.dumps(found), flush=True)
    MPI.COMM_WORLD.Barrier()  # the first rank that leaves Horovod ends MPI on all


if __name__ == "__main__":
    main(*sys.argv[1:])
