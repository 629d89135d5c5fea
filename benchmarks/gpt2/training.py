"""Training with simulated ranks on one device, which continues from a checkpoint with the same bits."""

from __future__ import annotations

import copy
import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.convergence.tasks.samples import Windows
from benchmarks.gpt2.exchanges import Board, exchange_for
from benchmarks.gpt2.model import SHAPES, build
from benchmarks.gpt2.text import Text
from examples.schedule import learning_rate_factor
from horovod_sparse.transport.base import Transport
from horovod_sparse.transport.in_process import run_ranks

RECORDS, CHECKPOINT = "records.jsonl", "checkpoint.pt"
WARMUP = 0.05  # share of the steps
_BETAS, _DECAY = (0.9, 0.95), 0.1  # of AdamW, as for GPT-3; no decay of vectors
_HELD_OUT = 256  # windows at most, spread evenly


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        exchange: Specification for ``exchange_for``.
        model: Name of a shape.
        ranks: Number of simulated ranks.
        sequences: Sequences per rank and step; each has the model's context as its length.
        steps: Number of steps.
        lr: Peak learning rate of AdamW.
        every: Steps between two evaluations.
        seed: Seed of the parameters and of the order of the data, the same for all exchanges.
        device: Kind of torch device. On ``cuda``, matrices are multiplied in bfloat16, on ``cpu`` in float32.
    """

    exchange: str
    model: str
    ranks: int
    sequences: int
    steps: int
    lr: float
    every: int
    seed: int
    device: str

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return SHAPES[self.model].context

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.ranks * self.sequences * self.context

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of forward passes."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")


class Data:
    """Batches of a run: windows of the training part in a new order in each epoch, and held-out windows.

    Args:
        text: The tokens.
        settings: Settings of the run.

    Raises:
        ValueError: A part is shorter than a step needs.
    """

    def __init__(self, text: Text, settings: Settings) -> None:
        length = settings.context
        self._settings = settings
        for part, needed in ((text.train, settings.tokens), (text.held_out, length)):
            if len(part) <= needed:
                raise ValueError(f"{len(part)} tokens are too few, more than {needed} are needed: pass more text")
        self._train = Windows(text.train, length, stride=length)
        self.held_out = Windows(text.held_out, length, stride=max(length, len(text.held_out) // _HELD_OUT))
        self._order: tuple[int, Any] = (-1, None)  # epoch, and its window numbers

    def batch(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a rank in a step, int64 of shape (sequences, context) on the device."""
        settings = self._settings
        count = settings.ranks * settings.sequences
        epoch, position = divmod(step, len(self._train) // count)
        order = self._order
        if order[0] != epoch:  # threads may compute it at the same time, with the same result
            order = self._order = epoch, np.random.default_rng([settings.seed, epoch]).permutation(len(self._train))
        mine = order[1][position * count :][rank * settings.sequences :][: settings.sequences]
        tokens, targets = self._train[mine]
        return tokens.to(settings.device), targets.to(settings.device)


class Training:
    """State that the ranks of a run share.

    Args:
        settings: Settings of the run.
        text: The text.
        folder: Folder of the run, for its records and its checkpoint; must exist.
        until: Returns whether to stop after a step; rank 0's result counts.

    Raises:
        ValueError: The folder has a checkpoint of a run with other settings, or the text is too short.
    """

    def __init__(self, settings: Settings, text: Text, folder: Path, until: Callable[[], bool] = lambda: False) -> None:
        self.settings, self.folder, self.until = settings, folder, until
        self.data = Data(text, settings)
        self.board = Board(settings.ranks)
        self.one_at_a_time = threading.Lock()  # forward and backward passes: memory for the activations of one rank
        self.states: list[dict[str, Any]] = [{} for _ in range(settings.ranks)]  # of the exchange on each rank
        self._vocabulary = text.vocabulary  # may be less than the model's, without a tokenizer
        self._identity = {"settings": asdict(settings), "text": text.facts()["text"]}
        if self.saved and self.saved["identity"] != self._identity:
            raise ValueError(f"{folder} belongs to {self.saved['identity']}, not to {self._identity}: use another one")

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The checkpoint; empty if there is none."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return {}
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return saved

    def run(self) -> int:
        """Train until the last step or until the time is up, and save; return the number of steps done."""
        settings = self.settings
        self._keep_records(self.saved.get("step", 0))
        torch.manual_seed(settings.seed)
        model = build(settings.model, self._vocabulary)
        replicas = [copy.deepcopy(model).to(settings.device) for _ in range(settings.ranks)]
        return run_ranks(settings.ranks, lambda transport: Rank(self, replicas[transport.rank], transport).run())[0]

    def save(self, **state: Any) -> None:
        """Replace the checkpoint, in one operation of the file system."""
        for own in self.states[1:]:  # buffers are the same on all ranks: one copy is enough
            for bucket, first in zip(own.get("buckets", ()), self.states[0].get("buckets", ()), strict=True):
                bucket.update({"buffers": first["buffers"]} if "buffers" in first else {})
        path = self.folder / CHECKPOINT
        partial = path.with_suffix(".partial")
        torch.save({"identity": self._identity, "exchanges": self.states, **state}, partial)
        partial.replace(path)

    def record(self, point: dict[str, Any]) -> None:
        """Append a point of the learning curve to the records, and print it."""
        with (self.folder / RECORDS).open("a") as file:
            file.write(json.dumps(point) + "\n")
        print(json.dumps(point), flush=True)

    def _keep_records(self, step: int) -> None:
        """Keep the records up to the step of the checkpoint; the others are about to be repeated."""
        path = self.folder / RECORDS
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
            partial = path.with_suffix(".partial")
            partial.write_text("".join(f"{line}\n" for line in lines))
            partial.replace(path)


class Rank:
    """One simulated rank.

    Args:
        training: What the ranks share.
        model: Replica of the model on this rank.
        transport: The ranks.
    """

    def __init__(self, training: Training, model: nn.Module, transport: Transport) -> None:
        self._training, self._settings = training, training.settings
        self._model, self._transport = model, transport
        self._optimizer = adamw(model, self._settings)
        self._exchange = exchange_for(self._settings.exchange, model, self._optimizer, transport, training.board)
        self._step, self._seconds, self._sent = 0, 0.0, 0.0
        self._losses: list[Tensor] = []

    def run(self) -> int:
        """Train; return the number of steps done."""
        saved = self._training.saved
        if saved:
            self._load(saved)
        since, stop = time.perf_counter(), False
        while self._step < self._settings.steps and not stop:
            self._train_step()
            stop = self._transport.broadcast_object(self._training.until())
            if self._step % self._settings.every == 0 or self._step == self._settings.steps:
                self._seconds += time.perf_counter() - since
                stop |= not self._evaluate()
                since = time.perf_counter()
        self._seconds += time.perf_counter() - since
        if not saved or self._step > saved["step"]:
            self._save()
        return self._step

    def _train_step(self) -> None:
        training, settings = self._training, self._settings
        factor = learning_rate_factor("cosine", self._step, max(1, round(WARMUP * settings.steps)), settings.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * factor
        batch = training.data.batch(self._step, self._transport.rank)
        self._optimizer.zero_grad()
        with training.one_at_a_time:
            with settings.autocast():
                loss = self._model(*batch)
            loss.backward()
        self._losses.append(loss.detach())
        self._optimizer.step()
        self._step += 1

    def _evaluate(self) -> bool:
        """Record a point of the learning curve on rank 0; return whether the training has not diverged."""
        loss = torch.stack(self._losses).mean().item()
        self._losses.clear()
        parameters = torch.stack([p.detach().double().sum() for p in self._model.parameters()]).sum().item()
        everyones = self._transport.allgather_object((loss, self._sent + self._exchange.bytes_sent, parameters))
        losses, sent, sums = zip(*everyones, strict=True)
        if len({repr(each) for each in sums}) > 1:
            raise RuntimeError(f"ranks have different parameters after step {self._step}; their sums are {sums}")
        held_out = self._held_out_loss() if self._transport.rank == 0 else 0.0
        held_out = self._transport.broadcast_object(held_out)
        if not math.isfinite(held_out):
            return False
        if self._transport.rank == 0:
            point = {
                "step": self._step,
                "tokens": self._step * self._settings.tokens,
                "train_loss": sum(losses) / len(losses),
                "held_out_loss": held_out,
                "bytes_sent": sum(sent) / len(sent),
                "seconds": round(self._seconds, 2),
            }
            self._training.record(point)
        return True

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        windows, batch, device = self._training.data.held_out, self._settings.sequences, self._settings.device
        total = 0.0
        for start in range(0, len(windows), batch):
            numbers = range(start, min(start + batch, len(windows)))
            tokens, targets = windows[numbers]
            with self._settings.autocast():
                total += self._model(tokens.to(device), targets.to(device)).item() * len(numbers)
        return total / len(windows)

    def _save(self) -> None:
        self._training.states[self._transport.rank] = self._exchange.state_dict()
        sent = self._transport.allgather_object(self._sent + self._exchange.bytes_sent)
        losses = self._transport.allgather_object([loss.item() for loss in self._losses])
        if self._transport.rank == 0:
            self._training.save(
                step=self._step,
                seconds=self._seconds,
                sent=sent,
                losses=losses,
                model=self._model.state_dict(),
                optimizer=self._optimizer.state_dict(),
            )

    def _load(self, saved: dict[str, Any]) -> None:
        rank = self._transport.rank
        self._step, self._seconds, self._sent = saved["step"], saved["seconds"], saved["sent"][rank]
        self._losses = [torch.tensor(loss, device=self._settings.device) for loss in saved["losses"][rank]]
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # ranks must not share its tensors
        self._exchange.load_state_dict(saved["exchanges"][rank])


def adamw(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW with weight decay of matrices only; fused, as separate passes take longer."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": _DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=_BETAS, fused=True)
