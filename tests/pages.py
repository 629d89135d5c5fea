"""Blocks and commands of README and the documentation."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "slurm/README.md", "packaging/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A code block, or a piece of code in a line of text.

    Attributes:
        page: Path in the repository.
        line: Line of the page, counted from 1.
        language: Word after the fence; "shell" for indented blocks, "inline" for code in a line of text.
        text: The code.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """Name in reports of pytest."""
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages."""
    return [block for path in PAGES for block in _read(path) if block.language in languages]


@cache
def _read(path: Path) -> list[Block]:
    found, page = [], str(path.relative_to(ROOT))
    for token in _MARKDOWN.parse(path.read_text()):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "fence":
            found.append(Block(page, line, token.info.split(" ")[0], token.content))
        elif token.type == "code_block":
            found.append(Block(page, line, "shell", token.content))
        found += [
            Block(page, line, "inline", child.content) for child in token.children or () if child.type == "code_inline"
        ]
    return found


def sides(diff: str) -> tuple[str, str]:
    """Return the code before and after a diff."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != other) for other in ("+", "-"))


def commands(text: str) -> list[tuple[dict[str, str], list[str]]]:
    """Return the simple commands of a shell block, each with the variables set in front of it.

    Where a line begins with ``$``, the other lines are output. Ellipses, which stand for more arguments, are left out.
    """
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return [command for line in lines for command in _split(line) if command[1]]


def _split(line: str) -> list[tuple[dict[str, str], list[str]]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if re.fullmatch("[|&;]+", word):
            parts.append([])
        elif word != "...":
            parts[-1].append(word)
    return [_variables(part) for part in parts]


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    variables = {}
    while words and re.match(r"[A-Z_]\w*=", words[0]):
        name, _, value = words[0].partition("=")
        variables[name], words = value, words[1:]
    return variables, words
