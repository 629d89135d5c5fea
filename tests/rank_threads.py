"""Tests whose ranks are threads of one process, over ``InProcessTransport``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from horovod_sparse.transport.in_process import run_ranks

# World sizes of the tests; None: ranks are MPI processes.
sizes: tuple[int, ...] | None = None


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep threads on one core: passing the GIL to another core takes longer."""
    cores = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, [cores[worker % len(cores)]])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def on_every_rank(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test that runs another on every rank and passes the rank's transport instead of the world size."""
    if hasattr(test, "hypothesis"):  # run each example on every rank
        inner = test.hypothesis.inner_test
        if not hasattr(inner, "__wrapped__"):  # parametrized tests share the inner test
            test.hypothesis.inner_test = _on_every_rank(inner)
        return test
    return _on_every_rank(test)


def _on_every_rank(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def run(*arguments: Any, transport: int, **given: Any) -> None:
        with _one_core():
            run_ranks(transport, lambda own: test(*arguments, transport=own, **given))

    return run
