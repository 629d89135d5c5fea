"""Mailboxes in a store that is slow, stopped or closed; and process groups whose store has none."""

from __future__ import annotations

import threading
import time

import launch
import pytest

from horovod_sparse.transport import torch_job
from horovod_sparse.transport.torch_job import Mail


class Store:
    """Fake client of a store; ``go`` is unset while the store's process is stopped."""

    def __init__(self):
        self.queues, self.go = {}, threading.Event()
        self.go.set()

    def queue_push(self, name, content):
        self.go.wait()
        self.queues.setdefault(name, []).append(content)

    def queue_len(self, name):
        self.go.wait()
        return len(self.queues.get(name, ()))

    def queue_pop(self, name, block):
        assert not block
        return self.queues[name].pop(0)


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(torch_job, "_PATIENCE", 0.2)


def test_a_stopped_store_delays_its_users_once_and_loses_nothing(hasty):
    store = Store()
    mail = Mail(store)
    store.go.clear()
    start = time.monotonic()
    assert mail.take("a") == []
    for _ in range(1000):
        mail.put("a", b"1")
        assert mail.take("a") == []
    assert time.monotonic() - start < 10  # and not 0.2 s each
    store.go.set()
    mail._last.result(10)
    assert mail.take("a") == [b"1"] * 1000


def test_a_closed_store_is_not_called_again():
    def fail(*_):
        calls.append(1)
        raise RuntimeError("Connection was likely closed")

    calls, store = [], Store()
    store.queue_push = fail
    mail = Mail(store)
    for _ in range(3):
        mail.put("a", b"1")
    assert calls == [1]
    assert mail.take("a") == []


PROGRAM = """
import sys
sys.modules["mpi4py"] = None
from torch import distributed
from horovod_sparse.frontends.members import transport_of

for initialized in (False, True):
    if initialized:
        distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    try:
        transport_of()
    except RuntimeError as error:
        print(error)
"""


def test_without_mpi_unusable_process_groups_are_refused_with_the_remedy(tmp_path):
    result = launch.python("-c", PROGRAM, str(tmp_path / "store"))
    missing, other = result.stdout.splitlines()
    assert missing.startswith("cannot use MPI (import of mpi4py halted"), result.stderr
    assert "start the program with torchrun and call torch.distributed.init_process_group() first" in missing
    assert other.startswith("rank 0: the store of torch")
    assert "use torch 2.8 or newer, and initialize the process group from the environment" in other
