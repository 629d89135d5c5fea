"""Job of the processes of torch's default process group, and the mailboxes of its ranks in the group's store."""

from __future__ import annotations

import functools
import hashlib
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

# No wait ends by itself: the watch reports stalls and ends them, and a process that dies closes its connections.
FOREVER = timedelta(days=365)
_PATIENCE = 1.0  # seconds to wait for the store


class TorchJob:
    """Job of all ranks of torch's default process group.

    Attributes:
        mail: Mailboxes of all ranks.

    Raises:
        RuntimeError: This version of torch, or the store of the process group, lacks what mailboxes need.
    """

    # Connections are private, so that `destroy_process_group` in the script does not close them.
    finalized = False

    def __init__(self) -> None:
        self.rank: int = distributed.get_rank()
        self.size: int = distributed.get_world_size()
        self._of_group: Any = _get_default_store()  # rank 0 may serve it: kept until this process ends
        self._made = Counter[tuple[int, ...]]()
        try:
            mail = self.store("mail")
            mail.queue_len("probe")
        except (AttributeError, RuntimeError) as error:
            raise RuntimeError(
                f"rank {self.rank}: the store of torch {torch.__version__}'s process group has no queues, which "
                "horovod_sparse needs without MPI: use torch 2.8 or newer, and initialize the process group from the "
                "environment that torchrun sets, or with init_method='tcp://...'"
            ) from error
        self.mail = Mail(mail)

    def store(self, name: str) -> Any:
        """Return a separate client of the job's store: a client that waits blocks its other users."""
        client = self._of_group.clone()
        client.set_timeout(FOREVER)
        return PrefixStore(f"horovod_sparse/{name}", client)

    def name_of(self, members: Sequence[int]) -> str:
        """Return a name for the next connection of some ranks, all of which call this equally often."""
        key = tuple(members)
        self._made[key] += 1
        return f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.{self._made[key]}"

    def on_finalize(self, call: Callable[[], None]) -> None:
        """Do nothing: communication is not shut down before the process ends."""

    def abort(self) -> None:
        """End this process. Its launcher ends the others, or those notice that its connections are closed."""
        os._exit(1)


@functools.cache
def job() -> TorchJob:
    """Return the job that this process belongs to; torch's default process group must be initialized."""
    return TorchJob()


class Mail:
    """Mailboxes in a store. A thread waits for the store, because the process that serves it may be stopped.

    After the store is gone, nothing is sent or arrives.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._arrived: dict[str, queue.SimpleQueue[bytes]] = {}
        self._operations: queue.SimpleQueue[tuple[Future[None], Callable[[], None]]] = queue.SimpleQueue()
        self._last = Future[None]()
        self._last.set_result(None)
        threading.Thread(target=self._run, name="horovod_sparse_mail", daemon=True).start()

    def put(self, box: str, content: bytes) -> None:
        """Put a message into a mailbox."""
        self._do(lambda: self._store.queue_push(box, content))

    def take(self, box: str) -> list[bytes]:
        """Return the messages that have arrived in a mailbox."""
        arrived = self._arrived.setdefault(box, queue.SimpleQueue())
        if self._last.done():
            self._do(partial(self._fetch, box, arrived))
        contents = []
        with suppress(queue.Empty):
            while True:
                contents.append(arrived.get_nowait())
        return contents

    def _fetch(self, box: str, arrived: queue.SimpleQueue[bytes]) -> None:
        while self._store.queue_len(box):
            arrived.put(self._store.queue_pop(box, block=False))

    def _do(self, operation: Callable[[], None]) -> None:
        """Do an operation on the thread; wait for it unless the thread has been busy for long."""
        before, self._last = self._last, Future[None]()
        self._operations.put((self._last, operation))
        if before.done():
            with suppress(TimeoutError):
                self._last.result(_PATIENCE)

    def _run(self) -> None:
        lost = False
        while True:
            done, operation = self._operations.get()
            try:
                if not lost:
                    operation()
            except RuntimeError:
                lost = True
            done.set_result(None)
