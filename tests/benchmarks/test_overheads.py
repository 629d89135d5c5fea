"""Nothing but the exchange takes more than log2 P messages, O(P) bytes and O(P) memory per rank."""

from __future__ import annotations

import math

import pytest

from benchmarks import overheads

pytestmark = pytest.mark.full

# Messages of the rank that sends the most, for more than 16 ranks: per doubling of the ranks, and besides.
MESSAGES = {
    "comparison of arguments": (3, 0),
    "number of an exchange": (1, 0),
    "construction of a bucket": (3, 14),
    "agreement of a step": (2, 0),
    "sum of a rule": (1, 0),
    "farewells": (4, -2),
    "save": (10, 0),
    "load": (10, 0),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("ranks", [32, 128])
def test_messages_grow_with_log2_of_the_ranks_and_bytes_at_most_with_the_ranks(name, ranks, tmp_path):
    cost = overheads.count(ranks, overheads.parts(tmp_path)[name])
    per_doubling, besides = MESSAGES[name]
    assert cost.messages == per_doubling * math.log2(ranks) + besides
    assert 0 < cost.nbytes <= 200 * ranks + 1000
    assert 0 < cost.memory <= 1000 * ranks + 400_000


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_in_a_stall_two_ranks_query_all_others_and_the_rest_query_one(ranks, tmp_path, caplog):
    cost = overheads.count(ranks, overheads.parts(tmp_path)["report of a stall"])
    assert cost.messages <= ranks + 2
    assert cost.mean <= 6
    assert cost.nbytes <= 100 * ranks + 200
    reports = sorted(record.getMessage().split(":")[0] for record in caplog.records)
    assert reports == sorted({"rank 0", f"rank {ranks // 2 + 1}"})


def test_a_link_is_measured_with_as_many_messages_on_any_number_of_ranks(tmp_path):
    few, many = (overheads.count(ranks, overheads.parts(tmp_path)["measurement of the link"]) for ranks in (4, 32))
    assert many.messages < 3 * few.messages


def test_the_command_prints_a_table(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["overheads", "--ranks", "2", "3"])
    overheads.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| messages; bytes; memory | 2 | 3 |"
    assert len(lines) == 2 + len(overheads.parts(tmp_path))
