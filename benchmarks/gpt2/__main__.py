"""Held-out loss of GPT-2 after the same tokens with dense and compressed gradients, on one device.

    python -m benchmarks.gpt2 --exchange dense --minutes 8
    python -m benchmarks.gpt2 --exchange recommended:density=0.01 --minutes 8
    python -m benchmarks.gpt2 --exchange recommended:density=0.002 --minutes 8
    python -m benchmarks.gpt2 --exchange powersgd:rank=4 --minutes 8
    python -m benchmarks.gpt2 --report runs/gpt2
    python -m benchmarks.gpt2 --model tiny --device cpu --ranks 3 --steps 300 --output runs/tiny    # a few minutes

Ranks are simulated: threads of one process, each with a replica of the model, its optimizer and its residual. They
compute gradients in turn, and exchange them with the package's own pipelines, as separate processes would. --exchange
is a compression in the syntax of hvs.parse; `none`, an average without any of this package's code; or `powersgd` with a
rank, computed by torch. Bytes are those that a rank would send. `recommended` needs a density, as threads have no
network to measure.

When the minutes are over, the state is saved. The same command continues from there until all steps are done; on the
CPU, with the bits of an uninterrupted run. Each run has a folder in --output for records and checkpoint, of up to 10 GB
with eight ranks of 124 million parameters. Text and tokenizer are made of the Python environment, once for each
--output. Learning rates are the same for all exchanges and not tuned: give --lr to tune them.

Expected on an H100, by floating-point operations: a step of 8 ranks with 16 sequences (131,072 tokens) takes 0.35 s at
320 TFLOP/s, 0.7 s at 160, and the exchange 0.1 to 0.3 s: 450 to 1000 steps in eight minutes. The 1600 steps of the
commands above then take two to four pieces for each run; with --steps 400, one piece. Replicas, optimizers and
residuals need about 30 GB, activations 20 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks import command_line
from benchmarks.gpt2.exchanges import compression_of
from benchmarks.gpt2.model import SHAPES, build
from benchmarks.gpt2.report import FACTS, report
from benchmarks.gpt2.text import Text, read_text
from benchmarks.gpt2.training import Settings, Training
from horovod_sparse.cli.units import at_least

RATES = {"gpt2": 6e-4, "gpt2-medium": 3e-4, "tiny": 2e-3}  # peak learning rates; those of GPT-3 for the first two
_EVALUATIONS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Train or report; return the exit status."""
    began = time.monotonic()
    options = build_parser().parse_args(arguments)
    try:
        if options.report:
            table, found = report(options.report)
            print(table)
            print(json.dumps(found))
            return 0
        settings = settings_of(options)
        text = read_text(options.output, SHAPES[options.model].vocabulary, options.text)
        steps = train(settings, text, options.output, began + 60 * options.minutes)
    except (OSError, ValueError) as error:
        print(f"gpt2: {error}", file=sys.stderr)
        return 1
    print(f"{steps} of {settings.steps} steps are done" + (": repeat the command" if steps < settings.steps else ""))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = command_line("gpt2", __doc__)
    add = parser.add_argument
    add("--exchange", type=_exchange, default="dense", help="how gradients are exchanged (default: %(default)s)")
    add("--model", choices=SHAPES, default="gpt2", help="default: %(default)s, with 124 million parameters")
    add("--ranks", type=at_least(1), default=8, help="simulated ranks (default: %(default)s)")
    add("--tokens-per-rank", type=at_least(1), help="tokens per rank and step (default: 16 sequences)")
    add("--steps", type=at_least(1), default=1600, help="steps of the run, over all pieces (default: %(default)s)")
    add("--lr", type=float, help="peak learning rate of AdamW, after a warm-up; then a cosine (default: the model's)")
    add("--every", type=at_least(1), help="steps between two evaluations (default: a 20th of all)")
    add("--seed", type=at_least(0), default=0, help="seed of parameters and batches (default: %(default)s)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--minutes", type=float, default=math.inf, help="save and stop after this time (default: at the last step)")
    add("--text", type=Path, nargs="+", default=[], metavar="DIR", help="folders of text (default: the environment's)")
    add("--output", type=Path, default=Path("runs/gpt2"), help="folder of all runs (default: %(default)s)")
    add("--report", type=Path, nargs="+", metavar="DIR", help="train nothing; print a table of the runs, and JSON")
    return parser


def _exchange(spec: str) -> str:
    """Check a specification of an exchange, and return it."""
    if spec != "none" and not re.fullmatch(r"powersgd:rank=[1-9]\d*", spec):
        try:
            compression_of(spec)
        except (ImportError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return spec


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings of the command line.

    Raises:
        ValueError: The tokens of a rank are no multiple of the context.
    """
    context = SHAPES[options.model].context
    sequences, rest = divmod(options.tokens_per_rank or 16 * context, context)
    if rest or not sequences:
        raise ValueError(f"--tokens-per-rank must be a multiple of {context}, not {options.tokens_per_rank}")
    return Settings(
        exchange=options.exchange,
        model=options.model,
        ranks=options.ranks,
        sequences=sequences,
        steps=options.steps,
        lr=RATES[options.model] if options.lr is None else options.lr,
        every=options.every or max(1, options.steps // _EVALUATIONS),
        seed=options.seed,
        device=options.device,
    )


def train(settings: Settings, text: Text, output: Path, until: float) -> int:
    """Train a run in its folder until a time of ``time.monotonic``; return the number of steps done."""
    torch.set_num_threads(1)  # the ranks are threads
    if not distributed.is_initialized():  # the package then asks torch, not MPI, which process this is
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    name = re.sub(r"[^\w.=,-]", "-", f"{settings.exchange}-lr={settings.lr:g}-seed={settings.seed}")
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(settings, text, folder, lambda: time.monotonic() > until)
    (folder / FACTS).write_text(json.dumps(facts(settings, text)))
    return training.run()


def facts(settings: Settings, text: Text) -> dict[str, Any]:
    """Return everything that a result depends on."""
    with torch.device("meta"):
        model = build(settings.model, text.vocabulary)
    return {
        **vars(settings),
        **text.facts(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "machine": torch.cuda.get_device_name() if settings.device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
