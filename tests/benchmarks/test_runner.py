"""The runner takes turns, continues from its file, reports wrong results and makes tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager

import launch
import pytest

from benchmarks.runner import Records, add_arguments, choose, column, last_line, program, run, spread, table

CELLS = [{"rate": "fast"}, {"rate": "slow"}]


class Benchmark:
    """A benchmark that notes what it measures."""

    def __init__(self, wrong: str = "") -> None:
        self.calls: list[tuple[str, str]] = []
        self.opened: list[str] = []
        self._wrong = wrong

    @contextmanager
    def open_cell(self, rate: str) -> Iterator:
        self.opened.append(rate)

        def measure(name: str) -> dict[str, float]:
            self.calls.append((rate, name))
            return {"ms": float(len(self.calls)), "wrong": int(name == self._wrong)}

        yield measure

    def run(self, *words: str, cells=CELLS, **ranks) -> int:
        parser = argparse.ArgumentParser()
        add_arguments(parser, ["a", "b"], turns=2)
        show = lambda found: table("", found, spread("ms"))  # noqa: E731
        return run(parser.parse_args(words), cells, self.open_cell, show, **ranks)


def test_contenders_take_turns_in_each_cell(capsys):
    benchmark = Benchmark()
    assert benchmark.run() == 0
    assert benchmark.calls == [(rate, name) for rate in ("fast", "slow") for _ in range(2) for name in "ab"]
    assert capsys.readouterr().out.splitlines()[:5] == [
        "",
        "rate fast",
        "   median  least  most",
        "a     2.0    1.0   3.0",
        "b     3.0    2.0   4.0",
    ]


@pytest.mark.parametrize("cut", ["", '{"rate": "fast", "contender": "b", "tu'])
def test_an_interrupted_benchmark_continues_where_it_was(cut, tmp_path, capsys):
    path = tmp_path / "new" / "file.jsonl"
    assert Benchmark().run("--output", str(path)) == 0
    lines, shown = path.read_text().splitlines(keepends=True), capsys.readouterr().out
    path.write_text("".join(lines[:3]) + cut)
    benchmark = Benchmark()
    benchmark.calls = [("fast", "a"), ("fast", "b"), ("fast", "a")]  # so that the times are the same
    benchmark.run("--output", str(path))
    assert benchmark.calls[3:] == [("fast", "b"), *[("slow", name) for name in "abab"]]
    assert path.read_text() == "".join(lines)
    assert capsys.readouterr().out == shown


def test_nothing_is_prepared_where_all_is_measured(tmp_path):
    words, benchmark = ["--output", str(tmp_path / "file")], Benchmark()
    benchmark.run(*words, cells=CELLS[:1])
    benchmark.run(*words)
    benchmark.run(*words, "--contenders", "b", "--turns", "1")
    assert benchmark.opened == ["fast", "slow"]
    benchmark.run(*words, "--contenders", "c", "a", "--turns", "3")
    assert benchmark.calls[8:] == [(rate, name) for rate in ("fast", "slow") for name in ("c", "c", "c", "a")]


def test_a_cut_first_line_leaves_no_records(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"tu')
    assert Records(path).lines == []
    assert path.read_text() == ""


def test_a_wrong_result_is_the_exit_status_also_where_it_was_measured_before(tmp_path):
    words = ["--output", str(tmp_path / "file")]
    assert Benchmark("b").run(*words) == 1
    assert Benchmark().run(*words) == 1
    assert Benchmark("b").run("--contenders", "a") == 0


def test_other_ranks_measure_what_rank_0_lacks_and_neither_write_nor_print(tmp_path, capsys):
    path, benchmark = tmp_path / "file", Benchmark()
    decided = iter([[{"rate": "fast", "contender": "b", "turn": 1}], [], 1])
    assert benchmark.run("--output", str(path), rank=1, broadcast=lambda content: next(decided)) == 1
    assert benchmark.calls == [("fast", "b")]
    assert not path.exists()
    assert not capsys.readouterr().out


def test_all_contenders_run_unless_some_are_given_and_unknown_ones_are_refused(capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser, (), turns=2)
    for words, chosen in (([], ["a", "b"]), (["--contenders", "b"], ["b"])):
        options = parser.parse_args(words)
        choose(parser, options, "ab")
        assert options.contenders == chosen
    with pytest.raises(SystemExit, match="2"):
        choose(parser, parser.parse_args(["--contenders", "c", "a"]), "ab")
    assert "unknown contenders c; known are: a, b" in capsys.readouterr().err


def test_columns_join_the_values_of_turns_and_are_empty_without_any():
    turns = [{"ms": [1.0, 2.0], "more": None}, {"ms": [4.0], "more": None}]
    columns = {"ms": column("ms"), "most": column("ms", "g", max), "more": column("more")}
    assert table("name", {"a": turns}, columns).splitlines() == ["name    ms  most  more", "a     2.00     4      "]


@pytest.mark.full
def test_a_function_is_called_on_each_rank(tmp_path):
    result = launch.python(*program("json:loads", json.dumps({"a": [1, "b"]})), ranks=2)
    assert result.returncode == 0, result.stderr
    assert last_line(result.stdout) == {"a": [1, "b"]}
