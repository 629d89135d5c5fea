"""Blocks of pinned memory: reused, and not written while the device uses them."""

from __future__ import annotations

import numpy as np
from devices import cupy, waits
from exchanges import allocations

from horovod_sparse.kernels import to_host
from horovod_sparse.transport.pinned import Pool


def test_blocks_are_used_again_and_grow_by_doubling():
    with allocations() as sizes:
        pool = Pool()
        for nbytes in range(5000, 40_000, 1000):
            block = pool.lend(nbytes)
            assert block.size >= nbytes
            pool.give_back(block)
    assert sizes == [8192, 16384, 32768, 65536]
    assert [block.size for blocks in pool._idle.values() for block in blocks] == [65536]


def test_blocks_in_use_are_not_handed_out_again():
    with allocations() as sizes:
        pool = Pool()
        for _ in range(5):
            blocks = [pool.lend(nbytes) for nbytes in (10, 0, 5000, 10)]
            assert len({block.view(1).ctypes.data for block in blocks}) == 4
            for block in blocks:
                pool.give_back(block)
    assert sizes == [4096, 4096, 8192, 4096]


def test_a_block_is_not_written_before_the_device_has_read_it():
    pool, arrays = Pool(), [cupy.empty(100_000, np.uint8) for _ in range(6)]
    for value, array in enumerate(arrays):
        block = pool.lend(array.nbytes)
        block.view(array.nbytes)[:] = value
        block.unload(array)
        pool.give_back(block)
    assert all((to_host(array) == value).all() for value, array in enumerate(arrays))


def test_a_short_block_is_not_freed_before_the_device_has_read_it():
    pool = Pool()
    block = pool.lend(4096)
    block.unload(cupy.empty(4096, np.uint8))
    pool.give_back(block)
    with waits(1):
        pool.lend(10_000)
