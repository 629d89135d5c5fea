from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

def accumulate(
    segments: Sequence[tuple[int, NDArray[Any]]],
    buffer: NDArray[Any],
    scale: float,
    threads: int,
    source: NDArray[Any] | None,
    clear: bool,
    velocity: tuple[NDArray[Any], float, float, bool] | None,
    /,
) -> None: ...
def select(
    segments: Sequence[tuple[int, NDArray[Any]]],
    buffer: NDArray[Any],
    k: int,
    scale: float,
    threads: int,
    source: NDArray[Any] | None,
    clear: bool,
    velocity: tuple[NDArray[Any], float, float, bool] | None,
    /,
) -> tuple[NDArray[np.int32], NDArray[Any]]: ...
def select_above(
    segments: Sequence[tuple[int, NDArray[Any]]],
    buffer: NDArray[Any],
    threshold: float,
    scale: float,
    threads: int,
    source: NDArray[Any] | None,
    clear: bool,
    velocity: tuple[NDArray[Any], float, float, bool] | None,
    /,
) -> tuple[NDArray[np.int32], NDArray[Any]]: ...
def largest(segments: Sequence[tuple[int, NDArray[Any]]], /) -> float: ...
def merge_sum(
    vectors: Sequence[tuple[NDArray[np.int32], NDArray[Any]]], size: int, /
) -> tuple[NDArray[np.int32], NDArray[Any]]: ...
def exclude(
    indices: NDArray[np.int32], values: NDArray[Any], others: NDArray[np.int32], /
) -> tuple[NDArray[np.int32], NDArray[Any]]: ...
def cut(
    indices: NDArray[np.int32], values: NDArray[Any], k: int, /
) -> tuple[tuple[NDArray[np.int32], NDArray[Any]], tuple[NDArray[np.int32], NDArray[Any]]]: ...
def count_magnitudes(values: NDArray[Any], prefix: int, shift: int, bits: int, /) -> NDArray[np.int64]: ...
def accumulate_moments(
    segments: Sequence[tuple[int, NDArray[Any]]], buffer: NDArray[Any], scale: float, threads: int, /
) -> tuple[int, float, float, float, float]: ...
def count_reaching(
    segments: Sequence[tuple[int, NDArray[Any]]],
    buffer: NDArray[Any],
    thresholds: NDArray[np.float64],
    threads: int,
    /,
) -> NDArray[np.int64]: ...
def square_norm(segments: Sequence[tuple[int, NDArray[Any]]], /) -> float: ...
def block_scores(
    segments: Sequence[tuple[int, NDArray[Any]]], buffer: NDArray[Any], block: int, threads: int, /
) -> NDArray[np.float64]: ...
def sample(
    segments: Sequence[tuple[int, NDArray[Any]]], buffer: NDArray[Any], scale: float, start: int, stride: int, /
) -> NDArray[Any]: ...
def scatter(
    indices: NDArray[np.int32] | None,
    values: NDArray[Any],
    outputs: Sequence[tuple[int, NDArray[Any]]],
    scale: float,
    cleared: bool,
    /,
) -> None: ...
def add(indices: NDArray[np.int32] | None, values: NDArray[Any], buffer: NDArray[Any], /) -> None: ...
def take(
    segments: Sequence[tuple[int, NDArray[Any]]], buffer: NDArray[Any], positions: NDArray[np.int32] | None, /
) -> NDArray[Any]: ...
def sketch_length(size: int, ratio: float, rows: int, /) -> int: ...
def sketch_update(
    sketch: NDArray[Any],
    buffer: NDArray[Any],
    delivered: NDArray[np.int32],
    rows: int,
    seed: int,
    carried: float,
    /,
) -> None: ...
def sketch_query(
    sketch: NDArray[Any], buffer: NDArray[Any], rows: int, seed: int, scale: float, add: bool, /
) -> None: ...
def quantize(buffer: NDArray[Any], bits: int, seed: int, /) -> tuple[NDArray[np.uint8], NDArray[np.float32]]: ...
def dequantize(
    codes: NDArray[np.uint8],
    units: NDArray[np.float32],
    buffer: NDArray[Any],
    bits: int,
    scale: float,
    add: bool,
    /,
) -> None: ...
def encode_indices(indices: NDArray[np.int32], /) -> tuple[int, NDArray[np.uint8]]: ...
def decode_indices(coded: NDArray[np.uint8], count: int, first: int, bits: int, end: int, /) -> NDArray[np.int32]: ...
def check_ascending(indices: NDArray[np.int32], end: int, /) -> None: ...
def key_range(values: NDArray[Any], /) -> tuple[int, int]: ...
def round_levels(values: NDArray[Any], bits: int, top: int, shift: int, /) -> tuple[NDArray[Any], NDArray[Any]]: ...
def encode_levels(values: NDArray[Any], bits: int, top: int, shift: int, /) -> NDArray[np.uint8]: ...
def decode_levels(
    codes: NDArray[np.uint8], count: int, bits: int, top: int, shift: int, dtype: np.dtype[Any], /
) -> NDArray[Any]: ...
def simd_level() -> str: ...
def use_simd(level: str, /) -> None: ...

# In builds with HOROVOD_SPARSE_TEST_HOOKS only.
def force(plan: tuple[float, float, float, int] | None, /) -> None: ...
def fallbacks() -> int: ...
def sample_positions(active: int, /) -> NDArray[np.int64]: ...
