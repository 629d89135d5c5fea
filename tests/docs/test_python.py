"""Every Python block of the documentation is checked by mypy against the package; complete programs run."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict

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


def check_types(folder, codes: dict[str, str]) -> str:
    """Return what mypy finds in pieces of code, in front of which all that they take from elsewhere is declared."""
    (folder / "mypy.ini").write_text(SETTINGS)
    files = {folder / (re.sub(r"\W", "_", name) + ".py"): code for name, code in codes.items()}
    for path, code in files.items():
        path.write_text(code)
    names = undefined(folder)
    for path, code in files.items():
        head = ["from typing import Any", "import torch", "import horovod_sparse as hvs"]
        head += [DECLARATIONS.get(name, f"{name}: Any") for name in sorted(names[str(path)])]
        path.write_text("\n".join([*head, code]))
    cache = ROOT / ".mypy_cache/docs"
    command = [sys.executable, "-m", "mypy", "--config-file", folder / "mypy.ini", "--cache-dir", cache, *files]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def undefined(folder) -> dict[str, set[str]]:
    """Return the names that each file in a folder takes from elsewhere."""
    command = ["ruff", "check", "--isolated", "--select", "F821", "--output-format", "json", folder]
    names = defaultdict(set)
    for found in json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout):
        names[found["filename"]].add(re.search("`(.*)`", found["message"])[1])
    return names


@pytest.mark.full
def test_mypy_finds_an_error_in_wrong_calls_and_none_in_the_blocks(tmp_path):
    wrong = {
        "preset": "hvs.Compression.topk(density=0.01)",
        "argument": "hvs.DistributedOptimizer(optimizer, compresion=None)",
        "method": "checkpoints.store(3)",
        "function": "hvs.metrics.start()",
    }
    found = check_types(tmp_path, {block.name: block.text for block in [*PYTHON, *AFTER]} | wrong)
    assert sorted(re.findall(r"(\w+)\.py:\d+: error:", found)) == sorted(wrong), found


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
