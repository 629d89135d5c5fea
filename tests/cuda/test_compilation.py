"""Compiled kernels are cached for the next process; a damaged or unwritable cache does not matter."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from devices import emulated

from horovod_sparse.kernels.cuda import compilation

NAME, KERNELS = "convert", [f"hvs::narrow_all<hvs::{stored}, float>" for stored in ("Half", "BFloat16")]


# Once: what is tested is where the result goes.
compile_for = functools.cache(compilation.compile_for)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the files that were compiled since."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    names: list[str] = []

    def noted(arch: str, name: str, kernels: list[str]) -> Any:
        names.append(name)
        return compile_for(arch, name, tuple(kernels))

    monkeypatch.setattr(compilation, "compile_for", noted)
    return names


def test_a_second_process_does_not_compile(compilations: list[str], tmp_path: Path) -> None:
    for _ in range(3):
        assert list(compilation.load(NAME, KERNELS)) == KERNELS
    assert compilations == [NAME]
    (kept,) = (tmp_path / "kernels").iterdir()
    assert kept.name.startswith("horovod_sparse_convert_")


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "no header", "another header"])
def test_a_damaged_file_is_replaced(compilations: list[str], tmp_path: Path, damage: str) -> None:
    compilation.load(NAME, KERNELS)
    (kept,) = (tmp_path / "kernels").iterdir()
    content = kept.read_bytes()
    head, _, code = content.partition(b"\n")
    kept.write_bytes(
        {
            "truncated": content[:-100],
            "changed": content[:-1] + bytes([content[-1] ^ 1]),
            "empty": b"",
            "no header": code,
            "another header": b"[1, 2]\n" + code,
        }[damage]
    )
    compilation.load(NAME, KERNELS)
    assert compilations == [NAME, NAME]
    restored = compilation._read(kept)
    assert restored is not None
    assert restored.names == json.loads(head)["names"]


def test_warns_if_the_cache_cannot_be_written(
    compilations: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "horovod_sparse"):
        assert list(compilation.load(NAME, KERNELS)) == KERNELS
    assert "set CUPY_CACHE_DIR to a writable folder" in caplog.text


def test_headers_are_inlined_once() -> None:
    text = compilation.source("select")
    assert '#include "' not in text
    assert text.count("struct Segment {") == 1


@pytest.mark.skipif(not emulated(), reason="the stand-in knows one architecture")
def test_unknown_architectures() -> None:
    assert compilation._target("90") == "sm_90"
    assert compilation._target("130") == "compute_90"
    with pytest.raises(RuntimeError, match=r"compute capability 60, but .* compiles for 90 and newer"):
        compilation._target("60")


def test_compile_errors_show_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "source", lambda name: "__global__ void kernel(unknown x) {}")
    with pytest.raises(RuntimeError, match=r"convert\.cu does not compile for sm_90(.|\n)*unknown"):
        compilation.compile_for("90", NAME, ["kernel"])
