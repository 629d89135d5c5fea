"""Every message in the table of docs/troubleshooting.md is one of the package."""

from __future__ import annotations

import ast
import re

import pytest
from pages import ROOT

TABLE = (ROOT / "docs/troubleshooting.md").read_text().split("## Error messages")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (`.+?) \|", TABLE, re.MULTILINE)
# Code without a space is the name of an argument or a rule.
MESSAGES = [message for row in ROWS for message in re.findall(r"`([^`]*\s[^`]*)`", row)]
OF_HOROVOD = {"Gradients were computed more than backward_passes_per_step times"}


def words(text):
    return re.findall(r"[A-Za-z]{2,}", text)


def templates():
    """Return the words of every text in the package; values in it have none."""
    for path in (ROOT / "horovod_sparse").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value for part in node.values if isinstance(part, ast.Constant))
                yield set(words(" ".join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield set(words(node.value))


TEMPLATES = [*templates()]


@pytest.mark.parametrize("message", sorted({*MESSAGES} - OF_HOROVOD))
def test_the_package_writes_this_message(message):
    """Some text of the package has all of its words but one, which may be a value."""
    wanted = set(words(message))
    assert any(len(wanted - found) <= 1 for found in TEMPLATES if len(found) < 80)


def test_an_outdated_message_is_detected():
    with pytest.raises(AssertionError):
        test_the_package_writes_this_message("the band of a reused threshold must hold")


def test_the_table_was_found():
    assert len(MESSAGES) > 30
