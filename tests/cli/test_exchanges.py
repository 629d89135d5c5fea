"""The benchmark times the pipeline of a training, detects wrong results, and computes bandwidths as documented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from laws import everywhere

from horovod_sparse.cli import exchanges
from horovod_sparse.cli.bench import PRESETS, configurations
from horovod_sparse.cli.exchanges import Bucket, windows
from horovod_sparse.config import Compression
from horovod_sparse.wire.header import HEADER_BYTES

pytestmark = [pytest.mark.mpi, pytest.mark.law]

SIZE, K = 3000, 30


@pytest.fixture
def bucket(transport):
    """Bucket whose memory already holds a residual."""
    bucket = Bucket(Compression.topka(density=K / SIZE), windows(SIZE, (7, transport.rank)), transport)
    bucket.run()
    return bucket


def spoil(monkeypatch: pytest.MonkeyPatch, bucket: Bucket, change: Callable[[np.ndarray], None]) -> None:
    """Make the pipeline's next total wrong."""
    allreduce = bucket.pipeline.rules.collective.allreduce  # type: ignore[attr-defined]

    def changed(*arguments: Any) -> Any:
        exchange = allreduce(*arguments)
        values = exchange.total.values.copy()
        change(values)
        return replace(exchange, total=replace(exchange.total, values=values))

    monkeypatch.setattr(bucket.pipeline.rules.collective, "allreduce", changed)  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [0.0, np.nan, 1e9])
@pytest.mark.parametrize("chunk", [70, 1 << 20])
def test_a_wrong_element_is_counted(transport, bucket, monkeypatch, value, chunk):
    monkeypatch.setattr(exchanges, "_CHUNK", chunk)
    spoil(monkeypatch, bucket, lambda values: values.put([1, -1], value))
    assert exchanges.wrong(transport, bucket) == 2


def test_entries_lost_by_the_memory_are_counted(transport, bucket, monkeypatch):
    close = bucket.pipeline.rules.memory.close

    def forget(accumulator, *arguments):
        close(accumulator, *arguments)
        accumulator.buffer[np.argmax(abs(accumulator.buffer))] = 0

    monkeypatch.setattr(bucket.pipeline.rules.memory, "close", forget)
    assert 1 <= exchanges.wrong(transport, bucket) <= transport.size


def test_bits_that_differ_between_ranks_are_counted(transport, bucket, monkeypatch):
    upwards = np.float32(np.inf if transport.rank else -np.inf)
    spoil(monkeypatch, bucket, lambda values: values.put(2, np.nextafter(values[2], upwards)))
    assert exchanges.wrong(transport, bucket) == transport.size - 1


def test_gradients_differ_between_iterations_and_ranks(transport):
    gradients, again = (windows(SIZE, (7, transport.rank)) for _ in range(2))
    assert not np.array_equal(gradients[0], gradients[1])
    assert np.array_equal(gradients[1], again[1])
    assert len(set(transport.allgather_object(gradients[0].tobytes()))) == transport.size


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_measured_without_errors(transport, name):
    gradients = windows(SIZE, (1, transport.rank))
    [(_, sparse)] = configurations([name], [0.01], SIZE)
    row = exchanges.measure(name, sparse, gradients, transport, iterations=3, warmup=1)
    assert row.wrong == 0
    assert 0 < row.best_ms <= row.max_ms
    assert row.min_ms <= row.avg_ms <= row.max_ms
    assert 0 < row.exchange_ms < row.min_ms
    assert row.apply_ms > 0
    # Of a bucket that is always dense, nothing is selected. Only a schedule that weighs waits for an agreement.
    assert (row.select_ms > 0) == (name != "dense")
    assert (row.agree_ms > 0) == (name == "gravac")
    assert row.total_entries > 0
    assert everywhere(transport, transport.broadcast_object(row) == row)


def test_bandwidths_and_bytes_follow_the_formulas(transport):
    gradients = windows(SIZE, (1, transport.rank))
    row = exchanges.measure("topka", Compression.topka(0.01), gradients, transport, iterations=4, warmup=2, check=False)
    ranks = transport.size
    assert row.wrong is None
    assert (row.size, row.nbytes, row.density, row.entries) == (SIZE, 4 * SIZE, 0.01, K)
    assert row.algbw == pytest.approx(4 * SIZE / (row.max_ms * 1e-3) / 1e9)
    assert row.busbw == pytest.approx(row.algbw * 2 * (ranks - 1) / ranks)
    counts = 16 * (ranks - 1)
    assert row.wire_bytes == pytest.approx((HEADER_BYTES + 8 * K) * (ranks - 1) + counts, abs=1)
