"""The loader of docs/checkpoint.md continues in the middle and at the end of an epoch."""

from __future__ import annotations

import io
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_sparse.checkpoint.state import require_loadable

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"
SAMPLES, BATCH, RANKS, STEPS = 23, 3, 2, 13  # 4 batches in an epoch

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def made(rank, workers):
    """Return a loader, and the function of the page that yields its batches."""
    (code,) = re.findall(r"```python\n(import itertools\n.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"dataset": range(SAMPLES), "ranks": RANKS, "rank": rank}
    code = code.replace("batch_size=32", f"batch_size={BATCH}").replace("num_workers=2", f"num_workers={workers}")
    exec(code, names)  # noqa: S102 - code of a page
    # Not left in the namespace of the function: a cycle would keep the workers, and collecting it takes 5 s for each.
    return names.pop("loader"), names.pop("batches")


def taken(loader, batches, first, count):
    """Return batches, each with a random number of the step, from the generator that dropout takes."""
    return [(batch.tolist(), torch.rand(1).item()) for batch in islice(batches(loader, first), count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_of_the_page_continues_after_any_step(workers):
    torch.manual_seed(1)
    whole = taken(*made(1, workers), 0, STEPS)
    assert [batch for batch, _ in whole[:4]] != [batch for batch, _ in whole[4:8]]
    for first in range(STEPS) if workers == 0 else (0, 3, 4, 5):
        loader, batches = made(1, workers)
        torch.manual_seed(1)
        assert taken(loader, batches, 0, first) == whole[:first]
        state, generator = loader.state_dict(), torch.get_rng_state()
        require_loadable(state, "data")
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        again, batches = made(1, workers)
        again.load_state_dict(torch.load(file, weights_only=True))
        torch.set_rng_state(generator)
        assert taken(again, batches, first, STEPS - first) == whole[first:]
