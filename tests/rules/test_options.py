"""Options of rules are checked on construction and compared as values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from horovod_sparse.rules.options import RuleOptions, integer, number, one_of


@dataclass(frozen=True, kw_only=True)
class Options(RuleOptions):
    count: int = integer(2, least=1, hint="two is usual")
    share: float = number(0.5, lambda x: 0 < x <= 1, "in (0, 1]")
    kind: str | None = one_of(None, "a", "b")
    threads: int = integer(1, free=True)


def test_an_option_is_checked_on_construction():
    with pytest.raises(ValueError, match="count must be an integer of at least 1, not 0: two is usual"):
        Options(count=0)


@pytest.mark.parametrize("value", [2**63, 10**400, True, 1.0, float("nan"), "3", None, [], b"1"])
def test_integers_are_limited_to_the_range_of_the_kernels(value):
    with pytest.raises(ValueError, match=r"count must be an integer of at (least 1|most 9223372036854775807), not"):
        Options(count=value)


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), 1j, "", [1], b"x", None, True])
def test_numbers_are_limited_to_the_range_of_a_float(value):
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], not"):
        Options(share=value)


def test_options_are_read_out_of_settings_and_compared_as_values():
    options = Options.read({"share": 1, "kind": "a", "of_another_rule": 7})
    assert options == Options(kind="a", share=1.0, threads=8)
    assert hash(options) == hash(Options(kind="a", share=1.0, threads=8))
    assert options != Options(kind="b", share=1)
    assert options.known() == {"count", "share", "kind", "threads"}
