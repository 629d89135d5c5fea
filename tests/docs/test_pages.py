"""Pages link to what exists, and read well as plain Markdown on a code host."""

from __future__ import annotations

import re

import pytest
from pages import PAGES, ROOT

FILES = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
README = (ROOT / "README.md").read_text()


def name(path):
    return str(path.relative_to(ROOT))


def headings(path):
    """Return the anchors of a page, as code hosts and MyST form them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_link_leads_somewhere(path):
    for link in LINK.findall(re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), link


# What plain Markdown lacks: tables of contents, and the reference from docstrings.
DIRECTIVES = {
    "docs/index.md": "toctree",
    "docs/collectives/index.md": "toctree",
    "docs/api.md": "eval-rst",
    "docs/own-rule.md": "eval-rst",
}
ROLE_LABEL_OR_DEFINITION = re.compile(r"(?:^|[\s(])\{[a-z:]+\}`|^\(\S+\)=$|^: ", re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_pages_need_no_sphinx(path):
    text = path.read_text()
    assert set(re.findall(r"^\s*[`:]{3,}\{(\S+)\}", text, re.MULTILINE)) <= {DIRECTIVES.get(name(path))}
    assert not ROLE_LABEL_OR_DEFINITION.findall(text)


def test_the_first_page_and_the_quick_start_are_short():
    assert len(README.split()) <= 900
    assert len((ROOT / "docs/quickstart.md").read_text().split()) <= 1500
    before_the_first_run = README.split() + (ROOT / "docs/start.md").read_text().split()
    assert len(before_the_first_run) <= 2500
