"""`horovod-sparse bench collectives`: Time and verify the sparse allreduces; run it under mpirun or srun.

Flags and columns follow nccl-tests. Every iteration starts with a barrier and runs one step of a bucket with random
gradients through the pipeline used in training, which replaces the gradients by their average.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_sparse.cli import exchanges, plot
from horovod_sparse.cli.exchanges import Row
from horovod_sparse.cli.units import at_least, binary_bytes, density, listed

if TYPE_CHECKING:
    from horovod_sparse.config import Sparse
    from horovod_sparse.transport.mpi import MPITransport

_NOTES = """\
# min, avg, max: time of the fastest rank, mean over the ranks and slowest rank; medians over the iterations
# select (includes the check for finite values), agree, exchange, apply (writes the dense average into the gradient):
# stages of the step, each on its fastest rank, which waited for no other
# recommended: at this density, without momentum, as there is no optimizer; the bytes are the same
# stable: a step that reuses its blocks; every hundredth step selects new ones, at about the cost of topk
# algbw: dense bytes / time of the slowest rank; busbw: algbw * 2 (P-1)/P; wire and messages: sent per rank, mean"""
# One preset for each collective; the others differ from these in what they select.
PRESETS = (
    *("recommended", "topka", "topkdsa", "gtopk", "oktopk", "spardl", "union"),
    *("randomblock", "stable", "hierarchical", "auto", "dense"),
)
_SETTINGS = {"recommended": ",memory=residual"}

# Heading, unit, width, format and attribute of `Row`.
_COLUMNS: tuple[tuple[str, str, int, str, str], ...] = (
    ("algorithm", "", 13, "", "algorithm"),
    ("size", "(B)", 15, ",", "nbytes"),
    ("elements", "", 14, ",", "size"),
    ("density", "", 9, "g", "density"),
    ("min", "(ms)", 11, ".3f", "min_ms"),
    ("avg", "(ms)", 11, ".3f", "avg_ms"),
    ("max", "(ms)", 11, ".3f", "max_ms"),
    ("select", "(ms)", 11, ".3f", "select_ms"),
    ("agree", "(ms)", 11, ".3f", "agree_ms"),
    ("exchange", "(ms)", 11, ".3f", "exchange_ms"),
    ("apply", "(ms)", 11, ".3f", "apply_ms"),
    ("algbw", "(GB/s)", 9, ".3f", "algbw"),
    ("busbw", "(GB/s)", 9, ".3f", "busbw"),
    ("wire", "(B)", 15, ",.0f", "wire_bytes"),
    ("messages", "", 10, ".1f", "messages"),
    ("#wrong", "", 8, "", "wrong"),
)


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    bench = subparsers.add_parser("bench", help="measure the exchange on this cluster")
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    parser = kinds.add_parser(
        "collectives", help="time and verify the sparse allreduces", description=str(__doc__).partition(": ")[2]
    )
    add = parser.add_argument
    add("-b", "--begin", type=binary_bytes, default="1M", help="smallest dense float32 vector in bytes (default: 1M)")
    add("-e", "--end", type=binary_bytes, help="largest vector in bytes (default: 64M, or --begin if larger)")
    add("-f", "--factor", type=at_least(2), default=4, help="factor between sizes (default: 4)")
    add("-n", "--iters", type=at_least(1), default=20, help="timed iterations (default: 20)")
    add("-w", "--warmup", type=at_least(0), default=5, help="warmup iterations (default: 5)")
    verify = "verify results: 1 or 0; 0 saves time on slow networks (default: 1)"
    add("-c", "--check", type=int, choices=(0, 1), default=1, help=verify)
    add("--density", type=listed(density), default="0.01", help="densities, separated by commas (default: 0.01)")
    add("--algorithms", type=listed(str), help="presets, separated by commas (default: all)")
    add("--json", type=Path, metavar="FILE", help="write environment and rows to FILE")
    add("--plot", type=Path, metavar="FILE.png", help="plot time over size to FILE.png")
    add("--seed", type=at_least(0), default=0, help="seed of the gradients (default: 0)")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print and write the results; return 1 if any is wrong, else 0, the same on every rank."""
    if options.end is None:
        options.end = max(options.begin, 64 * 2**20)
    if not 4 <= options.begin <= options.end:
        options.parser.error(f"requires 4 <= begin <= end, but -b is {options.begin} and -e is {options.end} bytes")
    transport = _connect(options.parser)
    first = transport.rank == 0
    try:
        named = configurations(options.algorithms, options.density, options.begin // 4)
        # Only rank 0 writes: on a shared file system, attempts of several ranks would disturb each other.
        own = plot.unwritable(options.json, plot=options.plot) if first else ""
        problem = transport.broadcast_object(own)
    except ValueError as error:
        problem = str(error)
    if problem and first:
        options.parser.error(problem)
    if problem:
        return 2  # the status of `parser.error` on rank 0
    about = environment(transport)
    if first:
        print("\n".join([title(about, options), _NOTES, *heads()]), flush=True)
    rows = []
    for row in measure(named, options, transport):
        rows.append(row)
        if first:
            print(line(row), flush=True)
    if first:
        write(rows, about, options)
    return int(any(row.wrong for row in rows))


def _connect(parser: argparse.ArgumentParser) -> MPITransport:
    """Return a transport of all ranks. Only this subcommand loads MPI; from here on, all ranks must exit together."""
    try:
        from mpi4py import MPI

        from horovod_sparse.control.lifecycle import process
        from horovod_sparse.transport.mpi import MPITransport, job, require_launcher

        require_launcher()
    except (ImportError, RuntimeError) as error:
        parser.error(f"{error} (`horovod-sparse check` shows what is missing)")
    process.join(job())
    process.abort_on_error()
    return MPITransport(MPI.COMM_WORLD)


def configurations(algorithms: list[str] | None, densities: list[float], smallest: int) -> list[tuple[str, Sparse]]:
    """Return names and configurations to measure: each preset (by default, all) at each density, and dense once.

    Raises:
        ValueError: A name is unknown, or the smallest vector is too small for the preset.
    """
    from horovod_sparse.config import Compression, parse

    stable: Any = Compression.stable().sparsifier
    block: int = stable.block
    named = []
    for name in algorithms or [name for name in PRESETS if name != "stable" or smallest >= block]:
        if name not in PRESETS:
            raise ValueError(f"unknown algorithm {name!r}; known are: {', '.join(PRESETS)}")
        if name == "stable" and smallest < block:
            raise ValueError(f"stable selects blocks of {block} elements, but -b gives vectors of {smallest}: raise -b")
        if name == "dense":
            named.append((name, parse(name)))
        else:
            named += [(name, parse(f"{name}:density={density}{_SETTINGS.get(name, '')}")) for density in densities]
    return named


def measure(named: list[tuple[str, Sparse]], options: argparse.Namespace, transport: Any) -> Iterator[Row]:
    """Yield the rows size by size; all configurations of a size get the same gradients."""
    nbytes = options.begin
    while nbytes <= options.end:
        gradients = exchanges.windows(nbytes // 4, (options.seed, transport.rank))
        for name, sparse in named:
            yield exchanges.measure(
                name, sparse, gradients, transport, options.iters, options.warmup, options.check == 1
            )
        nbytes *= options.factor


def environment(transport: Any) -> dict[str, Any]:
    """Return facts that the results depend on; a collective call."""
    import mpi4py
    import numpy as np
    from mpi4py import MPI

    from horovod_sparse import __version__
    from horovod_sparse.kernels import cpu

    return {
        "ranks": transport.size,
        "hosts": len(set(transport.allgather_object(MPI.Get_processor_name()))),
        "mpi": MPI.Get_library_version().partition("\n")[0].partition(",")[0].strip("\0 "),
        "mpi4py": mpi4py.__version__,
        "horovod_sparse": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "simd": cpu.simd_level(),
        "command": shlex.join(sys.argv),
    }


def title(about: dict[str, Any], options: argparse.Namespace) -> str:
    """Return the first line, which names versions, ranks, hosts and iterations."""
    return (
        f"# horovod_sparse {about['horovod_sparse']}, {about['mpi']}: {where(about)}, {options.iters} iterations "
        f"after {options.warmup} of warmup"
    )


def where(about: dict[str, Any]) -> str:
    """Return the numbers of ranks and hosts."""
    numbers = (f"{about[name]} {name[:-1] if about[name] == 1 else name}" for name in ("ranks", "hosts"))
    return " on ".join(numbers)


def heads() -> list[str]:
    """Return the two heading lines of the table: names and units."""
    names = "".join(name.rjust(width) for name, _, width, _, _ in _COLUMNS)
    units = "".join(unit.rjust(width) for _, unit, width, _, _ in _COLUMNS)
    return [f"#{names[1:]}", f"#{units[1:]}"]


def line(row: Row) -> str:
    """Return one line of the table."""
    values = [(getattr(row, name), width, layout) for _, _, width, layout, name in _COLUMNS]
    return "".join(("N/A" if value is None else format(value, layout)).rjust(width) for value, width, layout in values)


def write(rows: list[Row], about: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the requested files."""
    if options.json:
        content = {"environment": about, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    if options.plot:
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for row in rows:
            name = row.algorithm if row.algorithm == "dense" else f"{row.algorithm}, {row.density:g}"
            x, y = curves.setdefault(name, ([], []))
            x.append(row.nbytes)
            y.append(row.max_ms)
        title = f"{where(about)}: from gradients to their average"
        plot.save(options.plot, title, "dense vector in bytes", "time in ms", curves, {})
