"""Image classification with Horovod or DistributedDataParallel, dense or sparse.

    horovodrun -np 4 python examples/train.py --compression none --output runs/dense
    horovodrun -np 4 python examples/train.py --compression topka:density=0.01 --output runs/topka
    horovod-sparse report runs/dense runs/topka --output runs

Lines marked "sparse" enable sparse gradients. Apart from them and the timing, this is a plain training script.
``frontends.py`` contains what differs between Horovod and DistributedDataParallel (``--frontend ddp``, also under
torchrun). Each run writes ``result.json`` and ``statistics.jsonl``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from data import Batches, Images, Split, load
from frontends import DENSE, FRONT_ENDS, FrontEnd, LocalSteps
from models import MODELS, build
from progress import progress_bar
from record import Recorder
from saving import Saving
from schedule import SCHEDULES, learning_rate_factor
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the conventional name
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from watch import Watch

import horovod_sparse as hvs  # sparse
from horovod_sparse import metrics
from horovod_sparse.cli.units import at_least, real


def main() -> None:
    """Parse the arguments and train; with --checkpoint, a preemption signal saves a checkpoint and ends the run."""
    args = parse_arguments()
    try:
        data = load(args.data)
        for module in args.rules:  # sparse: importing a module registers its rules
            importlib.import_module(module)
        compression = args.compression if args.compression in DENSE else hvs.parse(args.compression)  # sparse
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"train.py: {error}")
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("train.py: --device cuda, but torch finds no GPU: run `horovod-sparse check`")
    if args.local_steps and (args.frontend != "horovod" or args.no_overlap or args.compression == "fp16"):
        sys.exit("train.py: --local-steps needs --frontend horovod, without --no-overlap or --compression fp16")
    with hvs.checkpoint.on_preemption() if args.checkpoint else nullcontext(lambda: False) as preempted:
        train(args, data, compression, preempted)


def train(args: argparse.Namespace, data: Split, compression: Any, preempted: Callable[[], bool]) -> None:
    """Train on this rank's shard of the data; rank 0 shows the progress and writes the results."""
    front_end = LocalSteps(args) if args.local_steps else FRONT_ENDS[args.frontend](args)
    torch.manual_seed(args.seed)
    model = build(args.model, data.channels, data.side, data.classes)
    scaler = torch.amp.GradScaler(args.device, enabled=args.amp)
    if args.device == "cuda":
        torch.cuda.set_device(front_end.local_rank % torch.cuda.device_count())  # ranks may share a GPU
    replica = front_end.replicate(model)
    optimizer = front_end.connect(build_optimizer(args, model), compression, scaler)
    torch.manual_seed(args.seed + front_end.rank)  # different augmentation on every rank
    sampler: DistributedSampler[Any] = DistributedSampler(data.train, front_end.size, front_end.rank, seed=args.seed)
    batches = build_batches(args, sampler)
    # With a private generator, iterating over the loader does not advance the global generator.
    loader = DataLoader(data.train, sampler=batches, batch_size=None, generator=torch.Generator())
    if front_end.rank == 0 and isinstance(compression, hvs.Sparse) and args.epochs * len(loader) < 1000:  # sparse
        few = "train.py: note: %d steps, %d of warm-up: below 1000 and 100, train dense, or at a density of 10 %%"
        print(few % (args.epochs * len(loader), args.warmup_epochs * len(loader)), file=sys.stderr)
    scheduler = build_scheduler(args, optimizer, len(loader))
    recorder = Recorder(args, front_end, model, optimizer, len(loader), Watch(args) if front_end.rank == 0 else None)
    states = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    saving = Saving(args, front_end, preempted, recorder, **states)
    position = saving.resume(args.batch_size * args.backward_passes_per_step * front_end.size, len(loader))
    metrics.enable(device=torch.cuda if args.device == "cuda" else None)
    with progress_bar(args.epochs * len(loader), show=front_end.rank == 0) as bar:
        bar.initial = bar.n = position.epoch * len(loader) + position.batch
        while position.epoch < args.epochs:
            sampler.set_epoch(position.epoch)
            batches.start = position.batch
            if isinstance(compression, hvs.Sparse):  # sparse: densities may depend on the epoch
                front_end.exchange.set_epoch(position.epoch)
            recorder.begin_epoch()
            saving.begin(position)
            for images, labels in loader:
                position.advance(train_step(args, front_end, replica, optimizer, scaler, images, labels))
                scheduler.step()
                bar.update()
                if position.batch < len(loader) and saving.leaves(position):
                    return
            if args.local_steps:
                optimizer.synchronize()  # sparse: all ranks evaluate the same parameters
            seconds = saving.seconds
            test_loss, accuracy = evaluate(args, front_end, model, data.test)
            recorder.end_epoch(float(position.loss) / len(loader), test_loss, accuracy, seconds)
            bar.set_postfix(refresh=False, loss=f"{test_loss:.3f}", accuracy=f"{accuracy:.2%}")
            position.next_epoch()
            if saving.leaves(position):
                return
    saving.finish(position)
    recorder.write()


def train_step(
    args: argparse.Namespace,
    front_end: FrontEnd,
    model: nn.Module,
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    images: Tensor,
    labels: Tensor,
) -> Tensor:
    """Run one optimizer step over ``backward_passes_per_step`` batches.

    Returns:
        Mean loss of this rank, a float64 scalar on the device; reading its value synchronizes the device.
    """
    images, labels = images.to(args.device), labels.to(args.device)
    mean_loss = torch.zeros((), dtype=torch.float64, device=args.device)
    model.train()
    optimizer.zero_grad()
    for start in range(0, len(images), args.batch_size):
        part = slice(start, start + args.batch_size)
        with nullcontext() if part.stop >= len(images) else front_end.accumulating():
            with metrics.span("forward"), torch.autocast(args.device, torch.float16, enabled=args.amp):
                loss = F.cross_entropy(model(images[part]), labels[part]) / args.backward_passes_per_step
            with metrics.span("backward"):
                scaler.scale(loss).backward()
        mean_loss += loss.detach()
    with front_end.exchanged():
        if args.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with metrics.span("update"):
            scaler.step(optimizer)
    scaler.update()
    return mean_loss


@torch.no_grad()
def evaluate(args: argparse.Namespace, front_end: FrontEnd, model: nn.Module, data: Images) -> tuple[float, float]:
    """Return mean loss and accuracy over the test set, which is divided among the ranks."""
    for name, buffer in model.named_buffers():  # average the batch norm statistics, which differ between ranks
        if buffer.is_floating_point():
            buffer.copy_(front_end.sum(buffer, f"buffer.{name}") / front_end.size)
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    share = range(front_end.rank, len(data), front_end.size)
    for start in range(0, len(share), args.batch_size):
        images, labels = (part.to(args.device) for part in data[share[start : start + args.batch_size]])
        logits = model(images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        sums += torch.tensor([loss.item(), correct.item(), len(labels)], dtype=torch.float64)
    loss_sum, right, count = front_end.sum(sums, "evaluate").tolist()
    return loss_sum / count, right / count


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer selected by --optimizer."""
    parameters, common = model.parameters(), {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=args.momentum, **common)
    if args.optimizer == "adam":
        return torch.optim.Adam(parameters, **common)
    return torch.optim.AdamW(parameters, **common)


def build_scheduler(args: argparse.Namespace, optimizer: Any, steps_per_epoch: int) -> LambdaLR:
    """Return a scheduler that updates the learning rate at every optimizer step."""
    warmup, steps = args.warmup_epochs * steps_per_epoch, args.epochs * steps_per_epoch
    return LambdaLR(optimizer, lambda step: learning_rate_factor(args.schedule, step, warmup, steps))


def build_batches(args: argparse.Namespace, sampler: DistributedSampler[Any]) -> Batches:
    """Return a sampler of one batch per optimizer step; the number of steps is the same on every rank."""
    images = args.batch_size * args.backward_passes_per_step
    batches = Batches(sampler, images, drop_last=True)
    if not len(batches):
        sys.exit(
            f"train.py: rank {sampler.rank} has {len(sampler)} images, too few for one step of {images}: "
            "lower --batch-size or --backward-passes-per-step, or start fewer ranks"
        )
    return batches


def resumption(text: str) -> str | int:
    """Parse the value of --resume: ``latest``, ``none`` or a step number."""
    return text if text in ("latest", "none") else at_least(0)(text)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Train an image classifier with Horovod or DistributedDataParallel, dense or sparse.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", default="digits", help="digits, fashion-mnist:DIR (IDX files), or cifar10:DIR (binary files)")
    add("--model", default="cnn", choices=MODELS)
    add(
        "--frontend",
        default="horovod",
        choices=FRONT_ENDS,
        help="horovod, or ddp: DistributedDataParallel",
    )
    add("--compression", default="none", help="dense: none or fp16; sparse: for example topka:density=0.01")
    add("--rules", action="append", default=[], metavar="MODULE", help="module that registers custom rules")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: GPU selected by the local rank")
    add("--amp", action="store_true", help="automatic mixed precision with float16 and loss scaling")
    add("--optimizer", default="sgd", choices=("sgd", "adam", "adamw"))
    add("--lr", type=real(), default=0.05, help="learning rate after the warm-up; not scaled by the world size")
    add("--momentum", type=real(below=1), default=0.9, help="momentum of SGD")
    add("--weight-decay", type=real(), default=5e-4)
    add("--schedule", default="cosine", choices=SCHEDULES, help="learning rate schedule")
    add("--warmup-epochs", type=at_least(0), default=3, help="epochs of linear warm-up")
    add("--batch-size", type=at_least(1), default=32, help="images per rank and backward pass")
    add("--backward-passes-per-step", type=at_least(1), default=1, help="backward passes per optimizer step")
    add("--local-steps", type=at_least(0), default=0, metavar="H", help="local steps per exchange; 0: no local steps")
    add("--outer-lr", type=real(), default=1, help="learning rate of the outer step of --local-steps")
    add("--outer-momentum", type=real(below=1), default=0, help="Nesterov momentum of the outer step")
    add("--no-overlap", action="store_true", help="exchange after the backward pass, so that stage times add up")
    add("--clip", type=real(), default=0.0, help="maximum gradient norm; 0: no clipping")
    add("--epochs", type=at_least(1), default=20)
    add("--seed", type=at_least(0), default=0)
    add("--checkpoint", type=Path, metavar="DIR", help="checkpoint folder, shared by all nodes")
    add("--checkpoint-every", type=at_least(0), default=0, metavar="N", help="interval in steps; 0: once per epoch")
    add("--keep", type=at_least(1), default=3, help="number of checkpoints to keep")
    add("--resume", type=resumption, default="latest", metavar="latest|none|STEP", help="checkpoint to resume from")
    add("--digest", metavar="HEX", help="resume only from a checkpoint with this digest")
    add("--trace", action="store_true", help="write trace.json with a timeline of the last epoch for ui.perfetto.dev")
    add("--tensorboard", type=Path, metavar="DIR", help="also write statistics for TensorBoard")
    add("--output", type=Path, default=Path("runs/train"), help="folder for result.json and statistics.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
