r"""Bytes that each CUDA kernel moves per element, from a profile of Nsight Compute, beside those counted from its code.

    ncu --csv --page raw --print-units base --log-file traffic.csv \
        --kernel-name 'regex:^(find_largest|draw|sweep|digit|compact|scatter)$' \
        --metrics dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum \
        python -m benchmarks.kernels.steps --device cuda --sizes 25.6M --contenders step --turns 1
    python -m benchmarks.kernels.traffic traffic.csv --size 25.6M --density 0.01

The count is that of a whole step, in which `sweep` writes zeros to the gradient. With --kept, for a profile of
benchmarks.kernels.selection, it leaves the gradient unchanged and moves 4 bytes less. ncu counts the bytes of DRAM,
with caches flushed before each kernel: in training, `digit` and `compact` find candidates in the cache.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import command_line
from horovod_sparse.cli.units import count, real

READ, WRITE, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
# Without --print-units base, ncu chooses a unit for each column.
UNITS = {
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "ns": 1e-9,
    "nsecond": 1e-9,
    "us": 1e-6,
    "usecond": 1e-6,
    "ms": 1e-3,
    "msecond": 1e-3,
}
_SECTOR = 32  # bytes moved for an element that is read or written alone
_SAMPLE = 65_536
_CANDIDATES = 1.1  # per selected entry


class Launch(NamedTuple):
    """Traffic of one launch of a kernel: bytes read and written, and seconds."""

    kernel: str
    read: float
    written: float
    seconds: float


def launches(lines: Sequence[str]) -> Iterator[Launch]:
    """Parse the CSV of ``ncu --csv --page raw``: a row of names, a row of units, then one row per launch.

    Raises:
        ValueError: There is no such table, a metric or a unit is missing or unknown, or a value is not a number.
    """
    errors = [line for line in lines if line.startswith("==ERROR==")]
    if errors:
        raise ValueError(f"ncu failed: {errors[0]}")
    rows = csv.DictReader(line for line in lines if line.startswith('"'))  # others are messages of ncu and the program
    wanted = ("Kernel Name", READ, WRITE, TIME)
    missing = [name for name in wanted if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"the profile lacks {', '.join(missing)}: call ncu with --csv --page raw and these --metrics")
    units = next(rows, {})
    unknown = {units.get(name) for name in (READ, WRITE, TIME)} - set(UNITS)
    if unknown:
        raise ValueError(f"the units {unknown} of the profile are unknown: call ncu with --print-units base")
    for row in rows:
        read, written, seconds = (float(row[one].replace(",", "")) * UNITS[units[one]] for one in (READ, WRITE, TIME))
        yield Launch(kernel_name(row["Kernel Name"]), read, written, seconds)


def kernel_name(signature: str) -> str:
    """Return the name in ``void sweep<float, (int)0>(const Segment *, ...)``, with a note of a velocity."""
    found = re.match(r"(?:void )?(?:\w+::)*(\w+)(<\w+, (?:\(int\))?1>)?", signature)
    if found is None:
        return signature
    return f"{found[1]}, velocity" if found[2] and found[1] == "sweep" else found[1]


def counted(size: int, density: float, clears: bool) -> dict[str, float]:
    """Return the bytes per element that kernels move by the count of their accesses, for float32 (docs/gpu.md).

    Args:
        size: Number of elements.
        density: Share of the entries.
        clears: Whether ``sweep`` clears the gradient.
    """
    candidates = _CANDIDATES * density
    sweep = (16 if clears else 12) + 8 * candidates
    return {
        "find_largest": 4,
        "draw": 2 * _SECTOR * min(_SAMPLE, size) / size,
        "sweep": sweep,
        "sweep, velocity": sweep + 8,
        "digit": 4 * candidates,  # in each of its launches
        "compact": 8 * candidates + (8 + _SECTOR) * density,
        "scatter": (8 + _SECTOR) * density,
    }


def show(found: Iterable[Launch], size: int, expected: Mapping[str, float]) -> None:
    """Print the median of each kernel's launches, in the order of their first launch."""
    by_kernel = defaultdict[str, list[Launch]](list)
    for launch in found:
        by_kernel[launch.kernel].append(launch)
    heads = ("launches", "read", "written", "moved", "counted", "us", "GB/s")
    print(f"bytes per element of {size:,}\n{'':16}" + "".join(f"{head:>10}" for head in heads))
    for kernel, group in by_kernel.items():
        read, written = median(one.read for one in group), median(one.written for one in group)
        seconds = median(one.seconds for one in group)
        moved = read + written
        numbers = (read / size, written / size, moved / size, expected.get(kernel, float("nan")))
        row = "".join(f"{number:10.2f}" for number in (*numbers, 1e6 * seconds, 1e-9 * moved / seconds))
        print(f"{kernel:16}{len(group):10d}{row}")


def main() -> int:
    """Print the table of a profile."""
    parser = command_line("kernels.traffic", __doc__)
    parser.add_argument("profile", type=Path, help="CSV that ncu wrote")
    parser.add_argument("--size", type=count, default="25.6M", help="elements of the bucket (default: 25.6M)")
    parser.add_argument("--density", type=real(below=1), default=0.01, help="share of the entries (default: 0.01)")
    parser.add_argument("--kept", action="store_true", help="the selection leaves the gradient unchanged")
    options = parser.parse_args()
    try:
        found = list(launches(options.profile.read_text().splitlines()))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    show(found, options.size, counted(options.size, options.density, not options.kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
