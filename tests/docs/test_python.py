"""Every Python block of the documentation is checked by mypy against the package; complete programs run."""

from __future__ import annotations

import ast
import builtins
import json
import re
import subprocess
import sys

import pytest
import yaml
from pages import PAGES, ROOT, Block, blocks, sides

PYTHON = blocks("python")
AFTER = [Block(block.page, block.line, "python", sides(block.text)[1]) for block in blocks("diff")]
BEFORE = [Block(block.page, block.line, "python", sides(block.text)[0]) for block in blocks("diff")]

# Declarations of what blocks take from the text around them; other names can be anything.
DECLARATIONS = {
    "checkpoints": "checkpoints: hvs.checkpoint.Checkpoints",
    "hvd": "import horovod.torch as hvd",
    "hvs": "",
    "nn": "from torch import nn",
    "np": "import numpy as np",
    "os": "import os",
    "scaler": "scaler: torch.amp.GradScaler",
    "state": "state: hvs.ddp.SparseState",
    "torch": "",
}
SETTINGS = """
[mypy]
python_version = 3.10
ignore_missing_imports = True
disable_error_code = no-redef, annotation-unchecked
[mypy-torch.*,lightning.*,transformers.*,accelerate.*,peft.*,numpy.*,mpi4py.*]
follow_imports = skip
[mypy-horovod_sparse.*]
follow_imports = silent
"""


@pytest.mark.parametrize("block", [*PYTHON, *BEFORE, *AFTER], ids=lambda block: block.name)
def test_every_block_is_python(block):
    ast.parse(block.text)


class Names(ast.NodeVisitor):
    """Collects the names that are read before they are defined."""

    def __init__(self):
        self.missing, self._defined = set(), set(dir(builtins))

    def visit_Assign(self, node):
        self.visit(node.value)
        self.visit_all(node.targets)

    def visit_AugAssign(self, node):
        self.visit(ast.Name(node.target.id, ast.Load()))
        self.visit(node.value)

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Store):
            self._defined.add(node.id)
        elif node.id not in self._defined:
            self.missing.add(node.id)

    def visit_FunctionDef(self, node):
        self._defined |= {node.name, *(one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg))}
        self.generic_visit(node)

    def visit_Lambda(self, node):
        self._defined |= {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        self.generic_visit(node)

    def visit_ClassDef(self, node):
        self._defined.add(node.name)
        self.generic_visit(node)

    def visit_Import(self, node):
        self._defined |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_all(self, nodes):
        for node in nodes:
            self.visit(node)


def missing(code: str) -> list[str]:
    """Return the names that code reads before it defines them."""
    names = Names()
    names.visit(ast.parse(code))
    return sorted(names.missing)


def complete(code: str) -> str:
    """Return code in front of which all that it takes from elsewhere is declared."""
    head = ["from typing import Any", "import torch", "import horovod_sparse as hvs"]
    return "\n".join([*head, *(DECLARATIONS.get(name, f"{name}: Any") for name in missing(code)), code])


def check_types(folder, codes: dict[str, str]) -> str:
    """Return what mypy finds in pieces of code."""
    (folder / "mypy.ini").write_text(SETTINGS)
    files = []
    for name, code in codes.items():
        files.append(folder / (re.sub(r"\W", "_", name) + ".py"))
        files[-1].write_text(complete(code))
    cache = ROOT / ".mypy_cache/docs"
    command = [sys.executable, "-m", "mypy", "--config-file", folder / "mypy.ini", "--cache-dir", cache, *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


@pytest.mark.full
def test_every_block_passes_mypy(tmp_path):
    found = check_types(tmp_path, {block.name: block.text for block in [*PYTHON, *AFTER]})
    assert found.startswith("Success"), found


@pytest.mark.full
def test_a_wrong_call_is_found(tmp_path):
    codes = {
        "preset": "hvs.Compression.topk(density=0.01)",
        "argument": "hvs.DistributedOptimizer(optimizer, compresion=None)",
        "method": "checkpoints.store(3)",
        "function": "hvs.metrics.start()",
    }
    found = check_types(tmp_path, codes)
    assert len(re.findall(r": error:", found)) == len(codes), found


@pytest.mark.full
def test_the_custom_rule_of_the_page_can_be_registered_and_obeys_the_laws():
    programs = [block.text for block in PYTHON if block.page == "docs/own-rule.md"]
    assert len(programs) == 3
    program = "\n".join([*programs, "for ranks in (1, 3):\n    test_strided(ranks)\nprint(compression.sparsifier)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "shift=3" in done.stdout


@pytest.mark.parametrize("block", blocks("yaml", "json"), ids=lambda block: block.name)
def test_yaml_and_json_can_be_read(block):
    documents = [json.loads(block.text)] if block.language == "json" else [*yaml.safe_load_all(block.text)]
    assert all(documents)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_fence_has_a_language_that_is_checked(path):
    known = {"bash", "diff", "json", "python", "text", "toml", "yaml"}
    found = re.findall(r"^```(\S+)$", path.read_text(), re.MULTILINE)
    assert {language for language in found if language[0] != "{"} <= known
