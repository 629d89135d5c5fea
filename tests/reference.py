"""Reference implementation of every kernel in plain NumPy; kernels must return the same bits.

Functions have the names and signatures of horovod_sparse.kernels.cpu, without performance options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.types import Velocity

Array = NDArray[Any]
Segments = Sequence[tuple[int, Array]]


def magnitude(x: Array) -> Array:
    """Return the bits of the absolute values, as integers in the same order; NaN is above infinity."""
    bits = np.abs(x).view(np.int32 if x.dtype == np.float32 else np.int64)
    return bits & np.iinfo(bits.dtype).max


def accumulate(
    gradients: Segments,
    buffer: Array,
    scale: float = 1.0,
    *,
    source: Array | None = None,
    clear: bool = False,
    velocity: Velocity | None = None,
) -> None:
    if source is not None:
        buffer[:] = source
    if scale == 0:
        buffer[:] = 0
    else:
        buffer *= buffer.dtype.type(scale)
    for start, gradient in gradients:
        here = slice(start, start + len(gradient))
        added = gradient.astype(buffer.dtype)
        if velocity is not None:
            momentum, share, fresh, weight = map(buffer.dtype.type, velocity[1:])
            u = velocity.values[here] = momentum * velocity.values[here] + share * added
            added = u if (fresh, weight) == (0, 1) else fresh * added + weight * u
        buffer[here] += added
        if clear:
            gradient[:] = 0


def active_positions(gradients: Segments) -> Array:
    ranges = [np.arange(start, start + len(gradient)) for start, gradient in gradients]
    return np.concatenate([np.arange(0), *ranges])


def move_out(positions: Array, buffer: Array) -> tuple[Array, Array]:
    """Move the values at ascending positions out of the buffer."""
    values = buffer[positions]
    buffer[positions] = 0
    return positions.astype(np.int32), values


def select(gradients: Segments, buffer: Array, k: int, scale: float = 1.0, **how: Any) -> tuple[Array, Array]:
    accumulate(gradients, buffer, scale, **how)
    positions = active_positions(gradients)
    largest_first = np.argsort(-magnitude(buffer[positions]), kind="stable")
    return move_out(np.sort(positions[largest_first[:k]]), buffer)


def select_above(
    gradients: Segments, buffer: Array, threshold: float, scale: float = 1.0, **how: Any
) -> tuple[Array, Array]:
    accumulate(gradients, buffer, scale, **how)
    positions = active_positions(gradients)
    reaches = magnitude(buffer[positions]) >= magnitude(np.array([threshold], buffer.dtype))
    return move_out(positions[reaches], buffer)


def largest(gradients: Segments) -> float:
    magnitudes = [np.abs(gradient.astype(np.float64)).ravel() for _, gradient in gradients]
    found = float(np.max(np.concatenate([np.zeros(1), *magnitudes])))
    return found if np.isfinite(found) else np.inf


def merge_sum(vectors: Sequence[tuple[Array, Array]], size: int) -> tuple[Array, Array]:
    total = np.zeros(size, vectors[0][1].dtype)
    present = np.zeros(size, bool)
    for indices, values in vectors:
        total[indices] = np.where(present[indices], total[indices] + values, values)
        present[indices] = True
    union = np.flatnonzero(present)
    return union.astype(np.int32), total[union]


def exclude(indices: Array, values: Array, others: Array) -> tuple[Array, Array]:
    stays = ~np.isin(indices, others)
    return indices[stays], values[stays]


def shifted(indices: Array, by: int) -> Array:
    return (indices + by).astype(np.int32)


def gathered(buffer: Array, positions: Array, factor: float) -> Array:
    return buffer[positions] * buffer.dtype.type(factor)


def places(indices: Array, cuts: Array) -> Array:
    return np.searchsorted(indices, cuts).astype(np.int64)


def reaching(indices: Array, values: Array, threshold: float) -> tuple[Array, Array]:
    stays = np.abs(values) >= values.dtype.type(threshold)
    return indices[stays], values[stays]


def cut(indices: Array, values: Array, k: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    largest = np.zeros(len(values), bool)
    largest[np.argsort(-magnitude(values), kind="stable")[:k]] = True
    return (indices[largest], values[largest]), (indices[~largest], values[~largest])


def count_magnitudes(values: Array, prefix: int, shift: int, bits: int) -> Array:
    keys = magnitude(values)
    agrees = keys >> (shift + bits) == prefix >> (shift + bits)
    return np.bincount(keys[agrees] >> shift & (2**bits - 1), minlength=2**bits)


# Elements per tile, tiles per block, and lanes per tile. The sums of tiles and of blocks are added in order.
TILE, TILES, SUM_LANES = 2048, 16, 8


def sum_in_lanes(x: Array) -> Any:
    """Return the sum of the float64 values of a tile: element i goes to lane i % 8, then the lanes are folded."""
    rows = np.concatenate([np.zeros(SUM_LANES), x, np.zeros(-len(x) % SUM_LANES)]).reshape(-1, SUM_LANES)
    lanes = np.add.accumulate(rows, axis=0)[-1]
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def add_in_order(terms: Sequence[Any]) -> Any:
    return np.add.accumulate([np.float64(0), *terms])[-1]


def tiles(start: int, stop: int) -> list[slice]:
    return [slice(at, min(at + TILE, stop)) for at in range(start, stop, TILE)]


def accumulate_moments(gradients: Segments, buffer: Array, scale: float = 1.0) -> tuple[Any, ...]:
    accumulate(gradients, buffer, scale)
    blocks = []
    for begin in range(0, len(buffer), TILE * TILES):
        bounds = [(max(start, begin), min(start + len(part), begin + TILE * TILES)) for start, part in gradients]
        blocks.append([buffer[tile].astype(np.float64) for start, stop in bounds for tile in tiles(start, stop)])

    def total(of: Callable[[Array], Array]) -> Any:
        return add_in_order([add_in_order([sum_in_lanes(of(x)) for x in block]) for block in blocks])

    x = buffer[active_positions(gradients)].astype(np.float64)
    return len(x), total(np.positive), total(np.square), total(np.abs), np.abs(x).max(initial=0)


def exact_moments(gradients: Segments, acc: Array) -> tuple[Any, ...]:
    """Return the moments without rounding after each addition; accumulate_moments approximates them."""
    x = acc[active_positions(gradients)].astype(np.longdouble)
    return len(x), x.sum(), (x * x).sum(), abs(x).sum(), abs(x).max(initial=0)


def count_reaching(gradients: Segments, buffer: Array, thresholds: Array) -> Array:
    keys = magnitude(buffer[active_positions(gradients)])
    return (keys >= magnitude(thresholds.astype(buffer.dtype))[:, None]).sum(axis=1)


def tail(gradients: Segments, buffer: Array, threshold: float) -> tuple[Any, Any]:
    low = np.float64(threshold).astype(buffer.dtype)
    reaching = ~(np.abs(buffer) < low)
    kept = np.where(reaching, buffer, buffer.dtype.type(0))
    segments = [(start, kept[start : start + len(part)]) for start, part in gradients]
    return reaching[active_positions(gradients)].sum(), accumulate_moments(segments, np.zeros_like(buffer), 0.0)[3]


def square_norm(gradients: Segments) -> Any:
    def norm(x: Array) -> Any:
        return add_in_order([sum_in_lanes(np.square(x[tile].astype(np.float64))) for tile in tiles(0, len(x))])

    return add_in_order([norm(gradient) for _, gradient in gradients])


def exact_square_norm(gradients: Segments) -> Any:
    """Return the square norm without rounding after each addition."""
    return sum(((gradient.astype(np.longdouble) ** 2).sum() for _, gradient in gradients), np.longdouble(0))


def block_scores(gradients: Segments, buffer: Array, block: int) -> Array:
    positions = active_positions(gradients)
    squares = np.zeros(len(buffer))
    squares[positions] = np.square(buffer[positions].astype(np.float64))
    parts = [tiles(start, min(start + block, len(buffer))) for start in range(0, len(buffer), block)]
    return np.array([add_in_order([sum_in_lanes(squares[tile]) for tile in part]) for part in parts], np.float64)


def sample(gradients: Segments, buffer: Array, scale: float, start: int, stride: int) -> Array:
    acc = buffer.copy()
    accumulate(gradients, acc, scale)
    return acc[active_positions(gradients)][start::stride]


def scatter(
    indices: Array | None, values: Array, outputs: Segments, scale: float = 1.0, *, cleared: bool = False
) -> None:
    del cleared  # only an optimization
    scaled = values * values.dtype.type(scale)
    if indices is None:
        indices = np.arange(len(values))
    for start, output in outputs:
        inside = (indices >= start) & (indices < start + len(output))
        narrow = scaled[inside]
        if output.dtype.itemsize == 2:
            narrow = narrow.astype(np.float32)
        output[:] = 0
        output[indices[inside] - start] = narrow.astype(output.dtype)


def add(indices: Array | None, values: Array, buffer: Array) -> None:
    buffer[slice(None) if indices is None else indices] += values


def take(gradients: Segments, buffer: Array, positions: Array | None) -> Array:
    positions = np.arange(len(buffer)) if positions is None else positions
    values = np.where(np.isin(positions, active_positions(gradients)), buffer[positions], 0).astype(buffer.dtype)
    buffer[np.intersect1d(positions, active_positions(gradients))] = 0
    return values


def wire_format(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def narrow(values: Array, name: str, out: Array | None = None) -> Array:
    """Convert float64 to bfloat16 via float32, and to float16 directly."""
    message = values.astype(wire_format(name), copy=False).view(np.uint8)
    if out is None:
        return message
    out[:] = message
    return out


def widen(message: Array, name: str, dtype: Any) -> Array:
    return message.view(wire_format(name)).astype(dtype, copy=False)


def round_values(values: Array, name: str) -> tuple[Array, Array]:
    largest = float(ml_dtypes.finfo(wire_format(name)).max)
    rounded = widen(narrow(np.clip(values, -largest, largest), name), name, values.dtype)
    return parted(values, rounded)


def parted(values: Array, rounded: Array) -> tuple[Array, Array]:
    """Return rounded values and their errors; a finite value whose error is not exact is all error."""
    error = values - rounded
    exact, finite = values - error == rounded, np.isfinite(values)
    rounded = np.where(exact, rounded, np.where(finite, 0, values))
    return rounded.astype(values.dtype), np.where(exact, error, np.where(finite, values, 0)).astype(values.dtype)


# --- encodings of indices and values -------------------------------------------------------------------------------


def encode_indices(indices: Array) -> tuple[int, Array]:
    if len(indices) < 2:
        return 0, np.empty(0, np.uint8)
    gaps = np.diff(indices.astype(np.int64)) - 1
    stride = -(-len(gaps) // 1024)
    sample = gaps[::stride]
    unknown = max(int(gaps.sum()) - stride * int(sample.sum()), 0)
    costs = [len(gaps) * bits + stride * int((sample >> bits).sum()) + (unknown >> bits) for bits in range(25)]
    bits = int(np.argmin(costs))
    highs = np.zeros(len(gaps) + int((gaps >> bits).sum()), np.int64)
    highs[np.cumsum((gaps >> bits) + 1) - 1] = 1
    return bits, np.concatenate([in_words((gaps[:, None] >> np.arange(bits) & 1).ravel()), in_words(highs)])


def in_words(bits: Array) -> Array:
    return np.packbits(np.pad(bits, (0, -len(bits) % 64)).astype(np.uint8), bitorder="little")


def decode_indices(coded: Array, count: int, first: int, bits: int, end: int) -> Array:
    """Decode indices; raise ValueError for a code that encode_indices does not produce."""
    gaps, stream = count - 1, np.unpackbits(coded, bitorder="little")
    used, low_end = gaps * bits, -(-gaps * bits // 64) * 64
    lows, highs = stream[:used].reshape(gaps, bits), stream[low_end:]
    ones = np.flatnonzero(highs)
    whole = bool(highs[-64:].any()) if gaps else not len(coded)
    if len(coded) % 8 or len(ones) != gaps or stream[used:low_end].any() or not whole:
        raise ValueError("coded indices")
    zeros = np.diff(ones, prepend=-1) - 1
    steps = (zeros << bits) + (lows.astype(np.int64) << np.arange(bits)).sum(1) + 1
    indices = first + np.concatenate([[0], np.cumsum(steps)])
    if indices[-1] >= end or first < 0:
        raise ValueError("coded indices")
    return indices.astype(np.int32)


INFINITE = 0x7F800000


def keys_of(values: Array) -> Array:
    keys = np.abs(values.astype(np.float32)).view(np.int32)
    return np.where(np.isfinite(values), np.minimum(keys, INFINITE - 1), keys).astype(np.int64)


def key_range(values: Array) -> tuple[int, int]:
    keys = keys_of(values)
    known = keys[(keys > 0) & (keys < INFINITE)]
    return (int(known.min()), int(known.max())) if len(known) else (0, 0)


def level_magnitudes(bits: int, top: int, shift: int) -> Array:
    """Return zero and the levels in ascending order."""
    largest = 2 ** (bits - 1) - 1
    keys = np.maximum(top - (np.arange(largest, 0, -1) - 1 << shift), 0)
    return np.concatenate([[0], keys]).astype(np.int32).view(np.float32)


def level_codes(values: Array, bits: int, top: int, shift: int) -> Array:
    magnitudes, keys, largest = level_magnitudes(bits, top, shift), keys_of(values), 2 ** (bits - 1) - 1
    level = largest - (np.maximum(top - keys, 0) + (1 << (shift - 1)) >> shift)
    tiny = keys.astype(np.int32).view(np.float32) < np.float32(0.5) * magnitudes[1]
    level = np.where(level < 1, np.where(tiny, 0, 1), level)
    codes = np.where(level == 0, 0, level + (largest + 1) * (values < 0))
    return np.where(keys >= INFINITE, largest + 1, codes).astype(np.uint8)


def level_values(codes: Array, bits: int, top: int, shift: int, dtype: Any) -> Array:
    magnitudes = level_magnitudes(bits, top, shift)
    # 0 - 0 is 0 without a sign.
    return np.concatenate([magnitudes, [np.nan], 0 - magnitudes[1:]]).astype(np.float32)[codes].astype(dtype)


def round_levels(values: Array, bits: int, top: int, shift: int) -> tuple[Array, Array]:
    return parted(values, level_values(level_codes(values, bits, top, shift), bits, top, shift, values.dtype))


def encode_levels(values: Array, bits: int, top: int, shift: int) -> Array:
    codes = level_codes(values, bits, top, shift)
    if bits == 8:
        return codes
    pairs = np.pad(codes, (0, len(codes) % 2)).reshape(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)


def decode_levels(codes: Array, count: int, bits: int, top: int, shift: int, dtype: Any) -> Array:
    wide = codes if bits == 8 else np.stack([codes & 15, codes >> 4], 1).ravel()
    return level_values(wide[:count], bits, top, shift, dtype)


def check_ascending(parts: Sequence[Array], end: int) -> None:
    for indices in parts:
        if len(indices) and (indices[0] < 0 or indices[-1] >= end or (np.diff(indices.astype(np.int64)) <= 0).any()):
            raise ValueError("indices: do not ascend")


# --- random numbers by position -----------------------------------------------------------------------------------

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: Array) -> Array:
    """Apply the finalizer of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(key: Array, i: Array) -> Array:
    return mix(key + (np.asarray(i).astype(np.uint64) + np.uint64(1)) * GOLDEN)


def key_of(seed: int) -> Array:
    return mix(np.array([seed], np.uint64))


# --- count sketch -------------------------------------------------------------------------------------------------

LANES, SECTION_VECTORS = 16, 1024


def sketch_length(size: int, ratio: float, rows: int) -> int:
    sections = -(-size // (LANES * SECTION_VECTORS))
    return LANES * rows * max(sections, int(ratio * size / (LANES * rows)))


def sketch_places(size: int, length: int, row: int, rows: int, seed: int) -> tuple[Array, Array]:
    """Return the counter and sign of each position in a row of the sketch."""
    positions, vectors = np.arange(size), -(-size // LANES)
    sections = max(-(-vectors // SECTION_VECTORS), 1)
    first_vectors = vectors * np.arange(sections) // sections
    first_groups = length // (LANES * rows) * np.arange(sections + 1) // sections
    section = np.searchsorted(first_vectors, positions // LANES, side="right") - 1
    begin, groups = first_groups[section], np.diff(first_groups)[section]
    bits = random_bits(random_bits(key_of(seed), row), positions // LANES)
    drawn = (bits >> np.uint64(32)) * groups.astype(np.uint64) >> np.uint64(32)
    group = rows * begin + row * groups + drawn.astype(np.int64)
    negative = bits >> (positions % LANES).astype(np.uint64) & np.uint64(1)
    return LANES * group + positions % LANES, np.where(negative, -1, 1)


def sketch_estimates(sketch: Array, size: int, rows: int, seed: int) -> Array:
    places = [sketch_places(size, len(sketch), row, rows, seed) for row in range(rows)]
    return np.median([sketch[counters] * signs.astype(sketch.dtype) for counters, signs in places], axis=0)


def sketch_update(sketch: Array, buffer: Array, delivered: Array, rows: int, seed: int, carried: float = 0.0) -> None:
    size, old, real = len(buffer), sketch.copy(), sketch.dtype.type
    found = sketch_estimates(old, size, rows, seed) if carried != 0 else np.zeros_like(buffer)
    change = buffer - real(carried) * found
    for row in range(rows):
        counters, signs = sketch_places(size, len(sketch), row, rows, seed)
        np.add.at(sketch, counters, change * signs.astype(sketch.dtype))
        if carried != 0:
            # Number of vectors per group; a partial last vector counts for all lanes.
            sharing = np.bincount(counters[::LANES] // LANES, minlength=len(sketch) // LANES).astype(sketch.dtype)
            at = counters[delivered]
            share = old[at] / sharing[at // LANES]
            np.add.at(sketch, at, real(carried) * (found[delivered] * signs[delivered].astype(sketch.dtype) - share))


def sketch_query(sketch: Array, buffer: Array, rows: int, seed: int, scale: float = 1.0, *, add: bool = False) -> None:
    found = sketch_estimates(sketch, len(buffer), rows, seed) * buffer.dtype.type(scale)
    buffer[:] = buffer + found if add else found


# --- stochastic quantization --------------------------------------------------------------------------------------

BLOCK = 256


def quantize(buffer: Array, bits: int, seed: int) -> tuple[Array, Array]:
    level, code = 2 ** (bits - 1) - 1, np.uint16 if bits == 16 else np.uint8
    blocks = [buffer[i : i + BLOCK] for i in range(0, len(buffer), BLOCK)]
    units = np.array([unit_of(block, bits) for block in blocks], np.float32)
    codes = [np.zeros(0, code)]
    for b, (block, unit) in enumerate(zip(blocks, units, strict=True)):
        drawn = draw(seed, b)[: len(block)]
        exact = block / block.dtype.type(unit) if unit > 0 else np.zeros_like(block)
        below = np.floor(exact)
        multiples = below + (drawn < exact - below)
        codes.append(pack((multiples + level).astype(code), bits, level))
    return np.concatenate(codes), units


def unit_of(block: Array, bits: int) -> float:
    """Return the smallest number with 24 - bits significant bits that is at least the largest magnitude / level."""
    largest = float(np.max(np.abs(block)))
    if largest == 0:
        return 0.0
    mantissa, exponent = np.frexp(largest / (2 ** (bits - 1) - 1))
    unit = float(np.ldexp(np.ceil(np.ldexp(mantissa, 24 - bits)), exponent - (24 - bits)))
    return max(unit, 2.0**-126) if unit <= np.finfo(np.float32).max else np.nan


def draw(seed: int, block: int) -> Array:
    """Return odd multiples of 2**-24: the upper 24 of every 32 bits, with the lowest one set."""
    random = random_bits(key_of(seed), BLOCK // 2 * block + np.arange(BLOCK // 2))
    halves = np.concatenate([random & np.uint64(0xFFFFFFFF), random >> np.uint64(32)])
    return (halves >> np.uint64(8) | np.uint64(1)).astype(np.float64) * 2.0**-24


def pack(codes: Array, bits: int, level: int) -> Array:
    if bits != 4:
        return codes
    padded = np.append(codes, np.full(len(codes) % 2, level, np.uint8))
    low, high = np.split(padded, 2)
    return low | high << 4


def dequantize(codes: Array, units: Array, buffer: Array, bits: int, scale: float = 1.0, *, add: bool = False) -> None:
    level, real = 2 ** (bits - 1) - 1, buffer.dtype.type
    for b, unit in enumerate(units):
        block = buffer[b * BLOCK : (b + 1) * BLOCK]
        per_block = BLOCK // 2 if bits == 4 else BLOCK
        packed = codes[b * per_block : (b + 1) * per_block]
        wide = np.concatenate([packed & 15, packed >> 4])[: len(block)] if bits == 4 else packed
        found = (wide.astype(buffer.dtype) - real(level)) * (real(scale) * real(unit))
        block[:] = block + found if add else found
