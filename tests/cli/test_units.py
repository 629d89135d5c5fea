"""Numbers with units are read as meant, and everything else is refused."""

from __future__ import annotations

import argparse

import pytest

from horovod_sparse.cli.units import at_least, bandwidth, binary_bytes, count, density, listed, real, seconds


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (binary_bytes, "65536", 65536),
        (binary_bytes, "64K", 65536),
        (binary_bytes, "1.5M", 1572864),
        (binary_bytes, "1g", 2**30),
        (count, "25600000", 25_600_000),
        (count, "25.6M", 25_600_000),
        (count, "7k", 7000),
        (count, "1.3B", 1_300_000_000),
        (count, "1e3", 1000),
        (bandwidth, "10Gbit", 1.25e9),
        (bandwidth, "100mbit/s", 1.25e7),
        (bandwidth, "300GB", 3e11),
        (bandwidth, "1.5TB/s", 1.5e12),
        (seconds, "5us", 5e-6),
        (seconds, "0.1 ms", 1e-4),
        (seconds, "2s", 2),
        (density, "0.01", 0.01),
        (density, ".5", 0.5),
        (density, "1e-3", 0.001),
        (density, "1", 1),
        (at_least(2), "2", 2),
        (at_least(0), "2147483647", 2**31 - 1),
        (real(), "1e-3", 0.001),
        (real(least=0.1), "60", 60),
        (listed(density), "0.001,0.01", [0.001, 0.01]),
    ],
)
def test_a_number_with_a_unit_is_read(convert, text, value):
    assert convert(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("convert", "text", "expected"),
    [
        (binary_bytes, "-1M", "64K"),
        (binary_bytes, "64Q", "64K"),
        (binary_bytes, "", "64K"),
        (binary_bytes, "nan", "64K"),
        (count, "0", "25.6M"),
        (count, "0.2", "at least 1"),
        (bandwidth, "10", "10Gbit or 300GB"),
        (bandwidth, "0Gbit", "10Gbit or 300GB"),
        (bandwidth, "10Gbps", "10Gbit or 300GB"),
        (bandwidth, "10Gb", "'10Gb' may mean bits or bytes"),
        (bandwidth, "10gb/s", "may mean bits or bytes"),
        (seconds, "5", "5us"),
        (seconds, "5 minutes", "5us"),
        (density, "0", "0.01"),
        (density, "-0.1", "0.01"),
        (density, "1.5", r"\(0, 1\]"),
        (density, "1%", "0.01"),
        (at_least(1), "0", "at least 1"),
        (at_least(1), "1.5", "at least 1"),
        (at_least(1), "2147483648", "at most 2147483647"),
        (at_least(1), 5000 * "9", "at most 2147483647"),
        (at_least(1), "\u0663", "at least 1"),
        (binary_bytes, "1e305G", "64K"),
        (count, "1e305T", "25.6M"),
        (count, "\u0663", "25.6M"),
        *((real(), text, "finite number of at least 0, not") for text in ("nan", "-1", "inf", "1e400", "", "x")),
        (real(below=1), "1", "below 1"),
        (real(least=0.1), "0", "at least 0.1"),
        (listed(density), "0.01,", "0.01"),
    ],
)
def test_bad_input_is_refused_with_an_example(convert, text, expected):
    with pytest.raises(argparse.ArgumentTypeError, match=expected):
        convert(text)
