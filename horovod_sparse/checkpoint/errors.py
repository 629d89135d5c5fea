"""The exception raised for checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """Failure to save or load a checkpoint; the message names rank, path, cause and remedy."""
