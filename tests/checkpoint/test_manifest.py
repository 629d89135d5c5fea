"""A manifest is read back as written, or refused for any other content of the file."""

from __future__ import annotations

import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_sparse.checkpoint import CheckpointError
from horovod_sparse.checkpoint.manifest import Entry, Manifest

RANKS = 3
FILES = {name: Entry(7, "ab" * 32) for name in ("shared.pt", *(f"rank-{rank:05d}.pt" for rank in range(RANKS)))}
MANIFEST = Manifest(step=120, number=4, ranks=RANKS, files=FILES)
HOSTILE = [
    *("1e999", "-1", "NaN", "Infinity", "-Infinity", "null", "true", "7.5", '"7"', "1" * 5000, "9223372036854775808"),
    *("[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "10000000", "[]", "{}"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step-00000120")
    for name in FILES:
        (folder / name).write_bytes(b"content")
    return folder


@pytest.fixture
def text(folder):
    MANIFEST.write(folder)
    return (folder / "manifest.json").read_text()


def outcome(folder, content):
    """Return the manifest read from the content, or None if it is refused."""
    path = folder / "manifest.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        return Manifest.read(folder)
    except CheckpointError as error:
        message = str(error)
    assert message.startswith(str(path))
    assert len(message) < 1000
    return None


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: value[:12])
@pytest.mark.parametrize("place", ["step", "number", "ranks", "format", "digest", "files", "bytes", "sha256"])
def test_an_impossible_number_is_refused_before_use(folder, text, place, value):
    content = json.loads(text)
    (content["files"]["shared.pt"] if place in ("bytes", "sha256") else content)[place] = "HERE"
    start = time.process_time()
    assert outcome(folder, json.dumps(content).replace('"HERE"', value)) is None
    assert time.process_time() - start < 1


@settings(max_examples=50)
@given(data=st.data())
def test_changed_bytes_are_refused(folder, data):
    MANIFEST.write(folder)
    content = bytearray((folder / "manifest.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position : position + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    assert outcome(folder, bytes(content)) in (None, MANIFEST)


@settings(max_examples=30)
@given(content=st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_other_content_is_refused(folder, content):
    assert outcome(folder, content) is None


@settings(max_examples=30)
@given(value=JSON, place=st.sampled_from(["step", "number", "ranks", "files", "shared.pt", "bytes"]))
def test_invalid_values_are_refused_even_with_a_matching_digest(folder, value, place):
    content = {"step": 120, "number": 4, "ranks": RANKS, "files": {name: vars(one) for name, one in FILES.items()}}
    if place == "bytes":
        content["files"]["shared.pt"] = {"bytes": value, "sha256": "ab" * 32}
    else:
        (content["files"] if place == "shared.pt" else content)[place] = value
    try:
        digest = Manifest(**content | {"files": {name: Entry(**one) for name, one in content["files"].items()}}).digest
    except (TypeError, AttributeError):
        digest = "00" * 32
    about = {"format": 3, "horovod_sparse": "1", "digest": digest}
    manifest = outcome(folder, json.dumps({**about, **content}))
    assert manifest is None or (place in ("step", "number", "bytes") and type(value) is int and value >= 0)


def test_a_manifest_is_read_back_as_written_up_to_a_maximum_length(folder, text):
    assert outcome(folder, text + " " * 100_000) == MANIFEST
    assert MANIFEST.size == 7 * (RANKS + 1)
    assert outcome(folder, " " * 100_000 + text) is None


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_regular_file_is_opened(tmp_path, kind):
    path = tmp_path / "manifest.json"
    if kind == "link":
        MANIFEST.write(tmp_path).rename(tmp_path / "elsewhere")
        path.symlink_to("elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    message = "is a symbolic link: put the file itself in its place" if kind == "link" else "is not a regular file"
    with pytest.raises(CheckpointError, match=f"{path} {message}"):
        Manifest.read(tmp_path)
