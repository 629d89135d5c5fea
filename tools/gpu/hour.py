#!/usr/bin/env python3
"""First hour on a GPU: runner of its parts, each less than nine minutes (docs/gpu.md, "The first hour").

    python -m tools.gpu.hour check --output runs/gpu

A step is one command with a time limit and a log, and a step that fails or hangs hides no other. The table at the end
and ``PART.json`` say how each ended, on which card and with which versions. Without a GPU a part is rehearsed: steps
run in the emulation or on the CPU at a small size, and those that need a device are listed as such.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from tools.mpitest import mpi_environment

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = re.compile(r"torch|cupy-cuda\w+|numpy|mpi4py|pytest|nvidia-(nccl|cuda-nvrtc)-?\w*")
NEEDED = (
    *("cupy", "joblib", "matplotlib", "ml_dtypes", "mpi4py", "scipy", "sklearn", "threadpoolctl", "torch", "tqdm"),
    *("hypothesis", "pytest", "pytest_mpi", "pytest_timeout", "xdist"),
)

QUICK = "not full and not nightly"
PYTEST = "python -m pytest -q -p no:cacheprovider"
MPITEST = "python tools/mpitest.py"
TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node"
KERNELS = f"{PYTEST} tests/cuda/test_every_kernel.py"
TRAINING_STEP = "python -m benchmarks.training_step"
FEW = "--device cpu --batch 4 --warmup 1 --steps 2 --contenders alone dense ours"  # of a rehearsal


@dataclass(frozen=True)
class Step:
    """Command of a part.

    Attributes:
        name: Name of the step and of its log.
        command: Command line, in which ``{output}`` is the folder of the results.
        limit: Seconds after which it is ended.
        rehearsal: Command line without a GPU; empty: there is none.
    """

    name: str
    command: str
    limit: int
    rehearsal: str = ""


# Steps of one group run at the same time, groups one after the other.
Groups: TypeAlias = list[list[Step]]


def check() -> Groups:
    """Return what shows within three minutes which layer fails first."""
    device = f"{PYTEST} tests/cuda/test_on_gpu.py tests/cuda/test_nccl.py"
    # Time to compile our kernels, if they do not come with the repository, and CuPy's own: a second or two for each.
    buckets = f"{MPITEST} --ranks 2 --limit 150 -- -m mpi tests/cuda/test_worker.py"
    front_ends = f"{MPITEST} --torchrun --ranks 2 --limit 150 -- -m mpi tests/cuda/test_front_ends.py"
    return [
        [Step("kernels", KERNELS, 150, KERNELS)],
        [Step("device", device, 120)],
        [
            Step("buckets", buckets, 160, f"{buckets} -k gravac"),
            Step("front-ends", front_ends, 160, f"{front_ends} -k topka"),
            Step("nccl", f"{TORCHRUN} 1 examples/ddp.py", 60),
        ],
    ]


def tests() -> Groups:
    """Return the tests that compare the bits of the GPU with those of the CPU; none is about time."""
    serial = f"{PYTEST} -n 8 --dist loadfile -m 'not mpi and {QUICK}' tests/cuda tests/kernels tests/transport"
    serial += " tests/collectives tests/wire tests/costs"
    under_mpi = f"{MPITEST} --ranks 2 3 --limit 220 -- -m"
    over_torch = " ".join(f"tests/transport/test_{name}.py" for name in ("base", "nodes", "torch_distributed"))
    torchrun = f"{MPITEST} --torchrun --ranks 2 3 --limit 200 -- -m '(mpi or law) and {QUICK}'"
    train = "mpirun -n 2 python examples/train.py --frontend ddp --data digits --model cnn --epochs 2 --device cuda"
    train += " --compression oktopk:density=0.05 --output {output}/train"
    ddp, fsdp = f"{TORCHRUN} 2 examples/ddp.py", f"{TORCHRUN} 2 examples/fsdp.py --shards 1"
    return [
        [
            Step("serial", serial, 460, f"{serial} --collect-only"),
            Step("mpirun-device", f"{under_mpi} 'mpi and {QUICK}' tests/cuda", 460),
            Step(
                "mpirun-laws",
                f"{under_mpi} '(mpi or law) and {QUICK}' tests/transport tests/collectives tests/wire",
                460,
            ),
            Step("torchrun", f"{torchrun} {over_torch} tests/cuda/test_front_ends.py", 420),
            Step("ddp", ddp, 100, ddp),
            Step("fsdp", fsdp, 100, f"{fsdp} --steps 4"),
            Step("train", train, 200, train.replace("--device cuda", "--device cpu")),
            Step("train-amp", f"{train}-amp --amp", 200),
        ],
        # With several GPUs: NCCL between them.
        [Step("all-gpus", f"{TORCHRUN} gpu examples/ddp.py", 60)],
    ]


def sanitize() -> Groups:
    """Return every kernel under each tool of compute-sanitizer; without memory pools, which hide stray accesses."""
    tools = ("memcheck", "racecheck", "initcheck", "synccheck")
    separate = "env HOROVOD_SPARSE_TEST_NO_POOLS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1"
    command = f"{separate} compute-sanitizer --error-exitcode 9 --tool {{}} {KERNELS} --timeout 0"
    return [[Step(tool, command.format(tool), 500) for tool in tools]]


def bench() -> Groups:
    """Return the times of selection and of whole steps, and the memory traffic of the kernels."""
    selection, steps = "python -m benchmarks.kernels.selection", "python -m benchmarks.kernels.steps"
    sizes = "--device cuda --densities 0.001,0.01 --sizes 25.6M,110M"
    output = "--output {output}"
    ncu = "ncu --clock-control none --csv --page raw --print-units base --log-file {output}/traffic.csv"
    ncu += " --kernel-name regex:^(find_largest|draw|sweep|digit|compact|scatter)$"
    ncu += " --metrics dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum"
    small = "--sizes 200k --turns 1"
    gpt2 = f"{TRAINING_STEP} --device cuda --overlap --density 0.01 --model"
    cnn = f"{TRAINING_STEP} --overlap --model cnn {FEW}"
    return [
        [
            Step(
                "selection",
                f"{selection} {sizes},336M {output}/selection.jsonl",
                160,
                f"{selection} {small}",
            )
        ],
        [Step("step", f"{steps} {sizes} {output}/step.jsonl", 90, f"{steps} {small}")],
        [Step("gpt2", f"{gpt2} gpt2 --batch 8 --output {{output}}/gpt2.jsonl", 90, cnn)],
        [Step("gpt2-medium", f"{gpt2} gpt2-medium --batch 4 --output {{output}}/gpt2-medium.jsonl", 90)],
        [Step("profile", f"{ncu} {steps} --device cuda --sizes 25.6M --contenders step --turns 1", 90)],
        [Step("traffic", "python -m benchmarks.kernels.traffic {output}/traffic.csv --size 25.6M --density 0.01", 20)],
    ]


def figure() -> Groups:
    """Return the parts of a step of VGG-16 on 1, 2 and 4 ranks that share the GPU, and their figure."""
    groups: Groups = []
    results = [f"{{output}}/vgg16-{ranks}.jsonl" for ranks in (1, 2, 4)]
    for ranks, result in zip((1, 2, 4), results, strict=True):
        launcher = f"mpirun -n {ranks} " if ranks > 1 else ""
        vgg16 = f"{launcher}{TRAINING_STEP} --device cuda --model vgg16 --batch 128 --density 0.001 --output {result}"
        cnn = f"{launcher}{TRAINING_STEP} --model cnn --output {result} {FEW}" if ranks < 4 else ""
        groups.append([Step(f"vgg16-{ranks}", vgg16, 160, cnn)])
    draw = "python -m benchmarks.training_step.figure --output {output}/vgg16 "
    groups.append([Step("figure", draw + " ".join(results), 40, draw + " ".join(results[:2]))])
    return groups


PARTS: dict[str, Callable[[], Groups]] = {
    "check": check,
    "tests": tests,
    "sanitize": sanitize,
    "bench": bench,
    "figure": figure,
}


@dataclass
class Ended:
    """How a step has ended.

    Attributes:
        name: Name of the step.
        outcome: "passed", "failed", "too long" or "needs a GPU".
        seconds: Time it took.
        summary: Last line of its output.
        command: Command line that ran.
    """

    name: str
    outcome: str = "needs a GPU"
    seconds: float = 0.0
    summary: str = ""
    command: str = ""


def run(step: Step, output: Path, rehearse: bool) -> Ended:
    """Run a step, with its output in a log."""
    template = step.rehearsal if rehearse else step.command
    if not template:
        return Ended(step.name)
    words = shlex.split(template.format(output=shlex.quote(str(output))))
    command = [sys.executable if word == "python" else word for word in words]
    log, begin = output / f"{step.name}.log", time.monotonic()
    (output / f"{step.name}.jsonl").unlink(missing_ok=True)  # a benchmark would not measure again
    # `timeout` ends the process group, and with it the ranks of a launcher; its status is 124, or 137 after SIGKILL.
    with log.open("w") as file:
        limited = ["timeout", "--kill-after=10", str(step.limit), *command]
        ended = subprocess.run(limited, cwd=ROOT, env=mpi_environment(), stdout=file, stderr=subprocess.STDOUT)
    outcome = {0: "passed", 124: "too long", 137: "too long"}.get(ended.returncode, "failed")
    return Ended(step.name, outcome, round(time.monotonic() - begin, 1), last_line(log), shlex.join(words))


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = (line.strip(" =\n") for line in log.read_text(errors="replace").splitlines())
    return next((line for line in reversed(list(lines)) if line), "")


def cards() -> list[str]:
    """Return name, driver and memory of each GPU; an empty list without a driver."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    return [] if listed.returncode else listed.stdout.splitlines()


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    found = {one.name: one.version for one in distributions() if PACKAGES.fullmatch(one.name)}
    return {"python": platform.python_version(), **dict(sorted(found.items()))}


def table(steps: Sequence[Ended]) -> str:
    """Return one line for each step."""
    width = max(len(step.name) for step in steps)
    return "\n".join(f"{s.name:{width}}  {s.outcome:11}  {s.seconds:6.1f} s  {s.summary[:80]}".rstrip() for s in steps)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part and return 1 if a step has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu", help="folder of logs and results")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="steps to run; default: all")
    options = parser.parse_args(arguments)
    found, output = cards(), options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if missing := [name for name in NEEDED if not find_spec(name)]:
        print(f"steps may fail, as these modules are not installed: {', '.join(missing)}", flush=True)
    ended: list[Ended] = []
    for group in PARTS[options.part]():
        chosen = [step for step in group if not options.only or step.name in options.only]
        with ThreadPoolExecutor(max(1, len(chosen))) as pool:
            ended += pool.map(lambda step: run(step, output, rehearse=not found), chosen)
    result = {"part": options.part, "cards": found, "versions": versions(), "steps": [asdict(step) for step in ended]}
    (output / f"{options.part}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.part} on {', '.join(found) or 'no GPU: a rehearsal'}; logs in {output}\n{table(ended)}")
    return int(any(step.outcome in ("failed", "too long") for step in ended))


if __name__ == "__main__":
    sys.exit(main())
