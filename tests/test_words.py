"""Docstrings, comments and messages of the package avoid unusual words and forms."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "horovod_sparse"
FILES = sorted(PACKAGE.rglob("*.py"))
# Each with the term to use instead.
BANNED = {
    r"doors?": "front end",
    r"rooms?|houses?|arrows?": "module, package, dependency",
    r"messengers?|parcels?": "transport, staging buffer",
    r"fillings?": "gradients of one step",
    r"tells?|told": "return, report, take",
    r"anew": "again, from scratch",
    r"so many|as many": "N; the number of",
    r"beside": "next to, while, in addition to",
    r"stands? in|standing in": "participate with zero gradients",
    r"takes?( it| them| that)? along|taken along": "piggyback",
    r"on (its|their) way": "in flight",
    r"whatever (became|becomes|becoming) of": "success or failure",
    r"there is room": "fits",
    r"travels? whole|whole gradient|sent whole|sends? whole": "dense, complete",
    r"passed over": "skipped",
    r"held back": "kept in the residual, delayed",
    r"asked for|is asked|are asked": "requested, called",
    r"handed in|hands? in": "submit",
    r"wants? to be": "must be",
    r"by way of|in the place of": "through; instead of",
}
PRONOUN = re.compile(r"(It|They|Them|Theirs|Its|Their|These|Those|That|This|Of|As)\b")


def texts(path):
    """Return the line and the text of every docstring, comment and string in a file."""
    source = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


KINDS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path):
    return [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, KINDS)]


def descriptions(path):
    """Return name and first line of every described argument and attribute in the docstrings of a file."""
    return re.findall(r"^    (\*{0,2}[a-z_]\w*): (.*)", "\n".join(docstrings(path)), re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_texts_use_the_terms_of_the_field(path):
    found = [
        f"{path.name}:{number}: {match.group()!r} (say: {instead}): {line.strip()}"
        for number, line in texts(path)
        for banned, instead in BANNED.items()
        if (match := re.search(rf"\b({banned})\b", line, re.IGNORECASE))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_begin_with_a_noun_or_a_verb_and_descriptions_name_what_they_describe(path):
    found = [text for text in docstrings(path) if re.match(r"(What|Where|Whether|How|Who|It|They)\b", text)]
    found += [f"{name}: {text}" for name, text in descriptions(path) if PRONOUN.match(text)]
    assert not found, "\n".join(found)
