"""`horovod-sparse check`: what this machine has, what is missing for training, and the remedy."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from horovod_sparse.cli.probes import Facts, run_all

_INSTALL_HOROVOD = "python tools/install_horovod.py (in a checkout of horovod_sparse)"


@dataclass(frozen=True)
class Item:
    """One line of the report.

    Attributes:
        name: What is looked for.
        found: Whether it is there.
        needed: Whether training cannot run without it.
        detail: Version and the like, or why it was not found.
        remedy: What to do where it was not found; may be empty.
    """

    name: str
    found: bool
    needed: bool
    detail: str
    remedy: str


def add_parser(subparsers: Any) -> None:
    """Adds this subcommand."""
    parser = subparsers.add_parser(
        "check", help="show what this machine has for training", description=__doc__.partition(": ")[2]
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each probe (default: 60)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the report; returns 0 where training can run on this machine and 1 where not."""
    facts = run_all(options.timeout)
    items = examine(facts)
    ready = all(item.found for item in items if item.needed)
    if options.json:
        about = {"version": _package_version(), "python": platform.python_version(), "ready": ready}
        print(json.dumps({**about, "items": [asdict(item) for item in items], "facts": facts}, indent=2))
    else:
        print(report(items, ready))
    return 0 if ready else 1


def report(items: list[Item], ready: bool) -> str:
    """The items as text, the needed ones first, in the manner of `horovodrun --check-build`."""
    lines = [f"horovod_sparse {_package_version()}, Python {platform.python_version()}"]
    for needed, title in ((True, "Needed for training:"), (False, "Optional:")):
        lines += ["", title]
        for item in items:
            if item.needed == needed:
                lines.append(f"    [{'X' if item.found else ' '}] {item.name}: {item.detail}")
                if not item.found and item.remedy:
                    lines.append(f"          -> {item.remedy}")
    lines += ["", "Training can run here." if ready else "Training cannot run here yet."]
    return "\n".join(lines)


def examine(facts: dict[str, Facts]) -> list[Item]:
    """Meaning of the facts for training; a pure function."""
    return [*_software(facts), *_mpi(facts["mpi"], facts["horovod"]), *_extras(facts["horovod"]), *_gpu(facts)]


def _software(facts: dict[str, Facts]) -> list[Item]:
    torch, horovod, kernels = facts["torch"], facts["horovod"], facts["kernels"]
    built = horovod.get("error") or f"{horovod['version']}, built {'with' if horovod['mpi'] else 'without'} MPI"
    return [
        Item("torch", "error" not in torch, True, _detail(torch, "version"), "pip install torch"),
        Item("Horovod", horovod.get("mpi", False), True, built, _INSTALL_HOROVOD),
        Item("kernels", "error" not in kernels, True, _detail(kernels, "simd"), "reinstall horovod_sparse"),
    ]


def _mpi(mpi: Facts, horovod: Facts) -> list[Item]:
    level = mpi.get("thread_level", "unknown")
    libraries = horovod.get("libraries", [])
    found = mpi.get("error") or f"{mpi['version']} (MPI {mpi['standard']}), through mpi4py {mpi['mpi4py']}"
    cuda = {True: "yes", False: "no", None: "unknown"}[mpi.get("cuda_aware")]
    return [
        Item("MPI", "error" not in mpi, True, found, "install an MPI and mpi4py: " + _INSTALL_HOROVOD),
        Item(
            "thread level",
            level == "MULTIPLE",
            True,
            level,
            "use an MPI built with MPI_THREAD_MULTIPLE, such as Open MPI 4",
        ),
        Item(
            "one MPI library in Horovod and mpi4py",
            len(libraries) == 1,
            True,
            ", ".join(libraries) or "unknown",
            _INSTALL_HOROVOD,
        ),
        Item("CUDA-aware MPI", cuda == "yes", False, cuda, "not needed: what is sent goes through pinned memory"),
    ]


def _extras(horovod: Facts) -> list[Item]:
    gloo, nccl = horovod.get("gloo", False), horovod.get("nccl", False)
    launchers = [name for name in ("horovodrun", "mpirun", "srun") if shutil.which(name)]
    rebuild = " python tools/install_horovod.py"
    return [
        Item(
            "launchers",
            bool(launchers),
            False,
            ", ".join(launchers) or "none",
            "activate the environment, or load the MPI module",
        ),
        Item("Horovod with Gloo", gloo, False, _yes(gloo), "not needed; HOROVOD_WITH_GLOO=1" + rebuild),
        Item("Horovod with NCCL", nccl, False, _yes(nccl), "for GPUs: HOROVOD_GPU_OPERATIONS=NCCL" + rebuild),
    ]


def _gpu(facts: dict[str, Facts]) -> list[Item]:
    torch, cupy, gpu = facts["torch"], facts["cupy"], facts["gpu"]
    devices = gpu.get("devices", [])
    major = (torch.get("cuda") or "12").partition(".")[0]
    detail = "none" if not devices else "; ".join(devices)
    items = [
        Item("GPU", bool(devices), False, detail, "not needed: training runs on the CPU"),
        Item(
            "CuPy", "error" not in cupy, False, _detail(cupy, "version"), f"pip install 'horovod_sparse[cuda{major}]'"
        ),
    ]
    if devices:
        seen = bool(torch.get("sees_gpu"))
        items.append(Item("torch sees the GPU", seen, False, _yes(seen), "install a build of torch with CUDA"))
    return items


def _detail(facts: Facts, name: str) -> str:
    return str(facts.get("error") or facts[name])


def _yes(found: bool) -> str:
    return "yes" if found else "no"


def _package_version() -> str:
    try:
        return version("horovod_sparse")
    except PackageNotFoundError:
        return "(not installed)"
