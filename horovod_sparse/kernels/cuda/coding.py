"""Compact encodings of indices and values on the device; kernels.protocol documents them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from horovod_sparse.kernels import to_host
from horovod_sparse.kernels.cuda.launch import (
    Module,
    blocks_for,
    check_dtype,
    check_real,
    instances,
    multiprocessors,
    real_of,
    zeros,
)
from horovod_sparse.kernels.formats import check_own
from horovod_sparse.kernels.types import MAX_SIZE, Array, Indices

_OF_INDICES = ("check_ascending", "sample_gaps", "pack_lows", "write_highs", "list_ones", "read_gaps")
_OF_CODES = instances(("encode_levels", "decode_levels"), (4, 8))
_MODULE = Module("coding", templates=["key_range", "round_levels"], plain=[*_OF_INDICES, *_OF_CODES])
_TILE = 1024  # gaps per block
_SAMPLED = 1024  # gaps that determine the number of low bits
_MOST_BITS = 24
_STATE = np.dtype([("count", np.int64), ("last", np.uint64), ("ticket", np.uint32), ("damaged", np.uint32)])
_INFINITE = 0x7F800000
_BLOCKS_PER_PROCESSOR = 8


def encode_indices(indices: Indices) -> tuple[int, Array]:
    """Implement ``cpu.encode_indices``; synchronizes twice: for a sample of the indices, and for the length."""
    gaps = check_dtype(indices, "indices").size - 1
    if gaps < 1:
        return 0, cupy.empty(0, np.uint8)
    bits, span = _choose_bits(indices, gaps)
    lows = 8 * (-(-gaps * bits // 64))
    highs = 8 * (-(-(gaps + (span - gaps >> bits)) // 64))
    coded = zeros(lows + highs, np.uint8)
    state, statuses = zeros(_STATE.itemsize, np.uint8), zeros(blocks_for(gaps, _TILE), np.uint64)
    count, low_words, high_words = np.array([gaps, lows // 4, highs // 4], np.int64)
    _MODULE.launch("pack_lows", blocks_for(lows // 4), indices, count, np.int32(bits), coded, low_words)
    what = indices, count, np.int32(bits), state, statuses, coded[lows:], high_words
    _MODULE.launch("write_highs", blocks_for(gaps, _TILE), *what)
    used = -(-int(to_host(state).view(_STATE)["count"][0]) // 64) * 8
    if used > highs:
        raise ValueError("indices: must ascend, without repeats")
    return bits, coded[: lows + used]


def _choose_bits(indices: Indices, gaps: int) -> tuple[int, int]:
    """Return the number of low bits with the shortest code for a sample, and the last index minus the first."""
    stride = -(-gaps // _SAMPLED)
    samples = blocks_for(gaps, stride)
    sampled = cupy.empty(2 * samples + 1, np.int32)
    _MODULE.launch("sample_gaps", blocks_for(samples), indices, *np.array([gaps, stride, samples], np.int64), sampled)
    host = to_host(sampled).astype(np.int64)
    sample = host[samples:-1] - host[:samples] - 1
    span = int(host[-1] - host[0])
    if sample.min() < 0 or span < gaps:
        raise ValueError("indices: must ascend, without repeats")
    ones = np.array([np.count_nonzero(sample >> bit & 1) for bit in range(31)])
    unknown = max(span - gaps - stride * int(sample.sum()), 0)
    costs = [
        gaps * bits + stride * int((ones[bits:] << np.arange(31 - bits)).sum()) + (unknown >> bits)
        for bits in range(_MOST_BITS + 1)
    ]
    return int(np.argmin(costs)), span


def decode_indices(coded: Array, count: int, first: int, bits: int, end: int) -> Indices:
    """Implement ``cpu.decode_indices``; synchronizes once, to validate the code."""
    nbytes = check_dtype(coded, "coded", np.uint8).size
    if not (1 <= count <= 8 * nbytes + 1 and 0 <= bits <= _MOST_BITS and 0 <= first < end <= MAX_SIZE):
        raise ValueError(f"coded indices: {count} from {first} to below {end}, with {bits} low bits in {nbytes} bytes")
    gaps = count - 1
    lows = 8 * (-(-gaps * bits // 64))
    words = (nbytes - lows) // 4
    if nbytes % 8 or (nbytes <= lows) != (gaps == 0) or 32 * words > MAX_SIZE + 64:
        raise ValueError(f"coded indices: {nbytes} bytes for {count} indices with {bits} low bits")
    indices: Indices = cupy.empty(count, np.int32)
    state, ones = zeros(2 * _STATE.itemsize, np.uint8), cupy.empty(gaps, np.uint32)
    word_tiles, tiles = blocks_for(words), max(1, blocks_for(gaps, _TILE))
    statuses = zeros(word_tiles + tiles, np.uint64)
    all_, low_words, high_words = np.array([gaps, lows // 4, words], np.int64)
    half = _STATE.itemsize
    what = coded[lows:], high_words, all_, state[:half], statuses[:word_tiles], ones
    _MODULE.launch("list_ones", word_tiles, *what)
    given = coded, low_words, all_, np.int32(bits), np.uint32(first), ones
    _MODULE.launch("read_gaps", tiles, *given, state[half:], statuses[word_tiles:], indices)
    if gaps == 0:
        return indices
    listed, read = to_host(state).view(_STATE)
    if listed["count"] != gaps or listed["damaged"] or read["damaged"] or int(read["last"]) >= end:
        raise ValueError(f"coded indices: not a code of {count} indices below {end}")
    return indices


def check_ascending(parts: Sequence[Indices], end: int) -> None:
    """Implement ``cpu.check_ascending``; synchronizes once."""
    filled = [indices for indices in parts if check_dtype(indices, "indices").size]
    damaged = zeros(1, np.uint32)
    for indices in filled:
        count, limit = np.array([indices.size, end], np.int64)
        _MODULE.launch("check_ascending", blocks_for(indices.size), indices, count, limit, damaged)
    if filled and to_host(damaged)[0]:
        raise ValueError(f"indices: must ascend from 0 to below {end}, without repeats")


def key_range(values: Array) -> tuple[int, int]:
    """Implement ``cpu.key_range``; synchronizes once."""
    size = check_real(values, "values").size
    found = zeros(2, np.int32)
    blocks = min(blocks_for(size, _TILE), _BLOCKS_PER_PROCESSOR * multiprocessors())
    _MODULE.launch(f"key_range<{real_of(values)}>", blocks, values, np.int64(size), found)
    low, high = to_host(found).tolist()
    return (_INFINITE - low if high else 0), high


def round_levels(values: Array, bits: int, top: int, shift: int) -> tuple[Array, Array]:
    """Implement ``cpu.round_levels``; does not synchronize."""
    check_real(values, "values")
    rounded, rest = cupy.empty_like(values), cupy.empty_like(values)
    levels = *_levels(bits, top, shift), np.int32((1 << (bits - 1)) - 1)
    what = values, np.int64(values.size), *levels, rounded, rest
    _MODULE.launch(f"round_levels<{real_of(values)}>", blocks_for(values.size), *what)
    return rounded, rest


def encode_levels(values: Array, bits: int, top: int, shift: int) -> Array:
    """Implement ``cpu.encode_levels``; does not synchronize."""
    levels = _levels(bits, top, shift)
    codes: Array = cupy.empty(blocks_for(check_real(values, "values").size, 8 // bits), np.uint8)
    what = values, np.int64(values.size), *levels, codes
    _MODULE.launch(f"encode_levels<{real_of(values)}, {bits}>", blocks_for(codes.size), *what)
    return codes


def decode_levels(codes: Array, count: int, bits: int, top: int, shift: int, dtype: np.dtype[Any]) -> Array:
    """Implement ``cpu.decode_levels``; does not synchronize."""
    levels = _levels(bits, top, shift)
    if check_dtype(codes, "codes", np.uint8).size != blocks_for(count, 8 // bits):
        raise ValueError(f"codes: {codes.size} bytes do not hold {count} values")
    values: Array = cupy.empty(count, check_own(dtype))
    what = codes, np.int64(count), *levels, values
    _MODULE.launch(f"decode_levels<{real_of(values)}, {bits}>", blocks_for(count), *what)
    return values


def _levels(bits: int, top: int, shift: int) -> tuple[Any, Any]:
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    if not (16 <= shift <= 23 and 0 <= top < _INFINITE and top % (1 << shift) == 0):
        raise ValueError(f"top must be a multiple of 2^shift and finite, and shift 16 .. 23, not {top} and {shift}")
    return np.int32(top), np.int32(shift)
