"""One bucket of DDP: its gradients, and the future that DDP waits for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterable

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from horovod_sparse.engine.device import device_of
from horovod_sparse.frontends.exchange import GradientExchange


class PendingBucket:
    """A DDP bucket that waits for the buckets of the exchange that hold its gradients.

    Args:
        buffer: Memory of the DDP bucket, into which results are written.
        exchange: The exchange.
    """

    def __init__(self, buffer: torch.Tensor, exchange: GradientExchange) -> None:
        self._buffer = buffer
        self._names = exchange.names  # which grows while this bucket waits for its parameters to be placed
        self._worker = weakref.proxy(exchange.worker)  # which keeps the last step, and with it this object
        self._lock = threading.Lock()
        self._waiting = 1  # buckets to wait for, and 1 until all gradients are submitted
        devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

    def submit(self, gradients: Iterable[tuple[torch.Tensor, torch.Tensor]], computed: Container[str]) -> None:
        """Submit all gradients of this bucket.

        Args:
            gradients: The parameters and their gradients.
            computed: Names of the parameters whose gradients were computed since the last exchange, also if they were
                frozen since.
        """
        named = [(self._names[p], p.requires_grad, gradient) for p, gradient in gradients]
        exchanges = [
            self._worker.put(name, gradient, hold=not (trained or name in computed))
            for name, trained, gradient in named
        ]
        for exchanged in dict.fromkeys(exchanges):
            with self._lock:
                self._waiting += 1
            exchanged.add_done_callback(self._arrived)
        self._arrived()

    def _arrived(self, _: object = None) -> None:
        """Count down; the last call resolves the future that DDP waits for."""
        with self._lock:
            self._waiting -= 1
            complete = not self._waiting
        if complete:
            # On the exchange's stream, for which DDP's stream then waits.
            with device_of(self._buffer.device).work():
                error = self._worker.step.error
                self.future.set_result(self._buffer if error is None else _Failure(error))  # type: ignore[arg-type]


class _Failure:
    """Result that raises an error where DDP takes it.

    DDP does not raise the exception of a future. It tries to cast any result to a tensor, and the message of the error
    calls ``str``, which raises here.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __str__(self) -> str:
        raise self._error

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        """Let futures of a GPU look for tensors, which they do with pickle."""
        return str, ()


def gradients_of(bucket: GradBucket) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters of a DDP bucket and their gradients."""
    parameters, gradients = bucket.parameters(), bucket.gradients()
    if any(p.is_complex() for p in parameters):  # all of them, in a buffer of reals, of which gradients() gives a half
        gradients = list(bucket.buffer().split([2 * p.numel() for p in parameters]))  # type: ignore[no-untyped-call]
    return zip(parameters, gradients, strict=True)
