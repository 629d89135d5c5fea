"""Tasks of the convergence benchmark, sized for two cores: two main ones, one for confirmation, three quick ones."""

from __future__ import annotations

from benchmarks.convergence.tasks.images import fashion_cnn, read_digits, read_fashion
from benchmarks.convergence.tasks.samples import Samples, Task, Windows, held_out
from benchmarks.convergence.tasks.text import (
    WordLSTM,
    WordTransformer,
    headers_lstm,
    larger_transformer,
    read_headers,
    read_reference,
    read_stdlib,
    stdlib_transformer,
)
from examples import models

TASKS = {
    task.name: task
    for task in (
        Task("fashion-mnist", "accuracy", fashion_cnn, read_fashion, 64, 0.1, 0.1, 1.5e-3, weight_decay=5e-4),
        Task("stdlib", "perplexity", stdlib_transformer, read_stdlib, 4, 0.2, 0.25),
        Task("stdlib-10m", "perplexity", larger_transformer, read_stdlib, 4, 0.2, 0.25, bucket_bytes=64 * 2**20),
        Task("headers", "perplexity", headers_lstm, read_headers, 8, 2.0, 2.0),
        Task("digits", "accuracy", lambda: models.cnn(1, 10), read_digits, 16, 0.05, 0.05),
        Task("lstm", "perplexity", WordLSTM, read_reference, 6, 1.0, 1.0),
        Task("transformer", "perplexity", WordTransformer, read_reference, 6, 0.15, 0.15),
    )
}

__all__ = ["TASKS", "Samples", "Task", "Windows", "held_out"]
