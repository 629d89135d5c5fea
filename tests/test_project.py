"""Files for people and services around the code: they can be read, agree with each other, and name what exists."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SPACK = (ROOT / "packaging/spack/package.py").read_text()
EASYBUILD = next((ROOT / "packaging/easybuild").glob("*.eb")).read_text()


def load(name):
    return yaml.safe_load((ROOT / name).read_text())


def test_the_citation_has_what_version_1_2_of_the_format_requires():
    citation = load("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "version", "license"} <= citation.keys()
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year", "url"} <= reference.keys()
        assert all("name" in author or "family-names" in author for author in reference["authors"])
        assert (reference["type"] == "conference-paper") == ("conference" in reference)
        assert isinstance(reference["year"], int)


def test_every_paper_of_a_rule_is_in_the_citation():
    pages = [ROOT / f"docs/{name}.md" for name in ("sparsifiers", "schedules", "local-steps")]
    pages += (ROOT / "docs/collectives").glob("*.md")
    cited = {reference["url"] for reference in load("CITATION.cff")["references"]}
    named = {url for page in pages for url in re.findall(r"https://arxiv\.org/abs/[\d.]+\d", page.read_text())}
    assert named <= cited


def test_ci_runs_what_a_developer_runs():
    (job,) = load(".github/workflows/ci.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert ".ci/run" in commands
    assert "make test-nightly SLURM=1" in commands


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_issue_forms_have_unique_fields(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    names = [field["id"] for field in form["body"]]
    assert len(names) == len(set(names))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_published_documentation_is_built_from_files_and_extras_that_exist():
    settings = load(".readthedocs.yaml")
    assert (ROOT / settings["sphinx"]["configuration"]).exists()
    (install,) = settings["python"]["install"]
    assert set(install["extra_requirements"]) <= PROJECT["optional-dependencies"].keys()


def test_pre_commit_uses_the_ruff_of_the_project():
    needed = next(one for one in PROJECT["optional-dependencies"]["dev"] if one.startswith("ruff"))
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    assert {*hook_dependencies(repository)} == {needed}


def hook_dependencies(repository):
    return [one for hook in repository["hooks"] for one in hook["additional_dependencies"]]


def test_the_recipes_are_python_and_name_every_dependency():
    ast.parse(EASYBUILD)
    calls = [node for node in ast.walk(ast.parse(SPACK)) if isinstance(node, ast.Call)]
    spack = {call.args[0].value for call in calls if getattr(call.func, "id", "") == "depends_on"}
    for requirement in PROJECT["dependencies"]:
        name, least = requirement.split(">=")
        assert f"py-{name.replace('_', '-')}@{least}:" in spack
    least = PROJECT["requires-python"].removeprefix(">=")
    assert f"python@{least}:" in spack
    modules = {"numpy": "SciPy-bundle", "torch": "PyTorch"}
    for requirement in PROJECT["dependencies"]:
        name = requirement.split(">=")[0]
        assert f"('{modules.get(name, name)}', " in EASYBUILD


def test_every_recipe_has_a_line():
    text = (ROOT / "packaging/README.md").read_text()
    assert all(folder.name in text for folder in (ROOT / "packaging").iterdir() if folder.is_dir())
