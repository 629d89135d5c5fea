"""Training steps under torch.compile with one front end; prints which of them differ from steps without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from front_ends import start
from sharding import full
from states import same
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from training import loss_of, mlp, settings, snapshot

import horovod_sparse as hvs

PARTS = ("step", "whole", "compiled backward")


def begin(front_end: str) -> Any:
    recommended = hvs.Compression.recommended(collective="topka", **settings())
    if front_end == "local":
        return start(front_end, mlp(), lambda ps: torch.optim.SGD(ps, 0.1), hvs.Compression.topka(**settings()))
    return start(front_end, mlp(), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9), recommended)


def trained(front_end: str, part: str = "") -> list[torch.Tensor]:
    """Return the parameters after steps of which a part is compiled; without a part, nothing is."""
    torch._dynamo.reset()
    started = begin(front_end)

    def compiled(function: Callable[..., Any], *parts: str) -> Callable[..., Any]:
        # A compiled function reads then whether backward() in it is compiled, too.
        with torch._dynamo.config.patch(compiled_autograd=part == "compiled backward"):
            return torch.compile(function, backend="eager", dynamic=False) if part in parts else function

    def backward(step: int) -> None:
        loss_of(started.model, distributed.get_rank(), step).backward()

    backward = compiled(backward, "compiled backward")
    stepping = compiled(started.optimizer.step, "step")

    def whole(step: int) -> None:
        started.optimizer.zero_grad()
        backward(step)
        stepping()

    train = compiled(whole, "whole")
    for step in range(3):
        train(step)
    return full(started.model) if isinstance(started.model, FSDPModule) else snapshot(started.model)


def outcome(front_end: str, part: str, expected: list[torch.Tensor]) -> str:
    try:
        return "same" if same(trained(front_end, part), expected) else "different"
    except RuntimeError as error:
        return str(error)


def with_pythons_reducer() -> str:
    """Return the error of DDP's reducer in Python, which passes gradients without buckets to hooks."""
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            loss_of(torch.compile(begin("DDP").model, backend="eager"), distributed.get_rank(), 0).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def main(front_end: str) -> None:
    hvs.ddp.init_process_group("gloo")
    if front_end in ("Horovod", "local"):
        import horovod.torch as hvd

        hvd.init()
    traced = set()  # functions of the package that Dynamo has compiled

    def note(code: Any, _: Any) -> None:
        if code.co_filename.startswith(str(Path(hvs.__file__).parent)):
            traced.add(code.co_qualname)

    torch._dynamo.convert_frame.register_bytecode_hook(note)
    expected = trained(front_end)
    report: dict[str, Any] = {part: outcome(front_end, part, expected) for part in PARTS}
    captures = torch._dynamo.utils.counters["compiled_autograd"]["captures"]
    if front_end == "DDP":
        report["python_reducer"] = with_pythons_reducer()
    report = {"rank": distributed.get_rank(), "captures": captures, "traced": sorted(traced), **report}
    print(json.dumps(report) + "\n", end="", flush=True)  # in one piece
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
