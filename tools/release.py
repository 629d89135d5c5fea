"""Checks before a release: the same version everywhere, a tag on a clean commit, and packages of that version.

python tools/release.py               # versions, changelog and tag
python tools/release.py --packages    # the files of dist/, too
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Where the version is written, with the pattern that finds it.
_PLACES = {
    "horovod_sparse/__init__.py": r'^__version__ = "(.+)"$',
    "CHANGELOG.md": r"^## \[(.+)\]",
    "CITATION.cff": r"^version: (.+)$",
    "packaging/spack/package.py": r'^    version\("(\d.*?)"',
    "packaging/easybuild/*.eb": r"^version = '(.+)'$",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what stands in the way of a release, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", action="store_true", help="check the files of dist/, too")
    options = parser.parse_args(arguments)
    found = [*version_problems(ROOT), *changelog_problems(ROOT), *git_problems(ROOT)]
    if options.packages:
        found += package_problems(ROOT)
    print("\n".join(f"release: {problem}" for problem in found) or f"release: {version(ROOT)} can be released")
    return bool(found)


def versions(root: Path) -> dict[str, str]:
    """Return the version by the file that holds it; the changelog's is that of its first section.

    Raises:
        ValueError: A file is missing or holds no version.
    """
    found = {}
    for place, pattern in _PLACES.items():
        for path in [*root.glob(place)] or [root / place]:
            name = str(path.relative_to(root))
            match = re.search(pattern, path.read_text(), re.MULTILINE) if path.exists() else None
            if match is None:
                raise ValueError(f"{name} holds no version")
            found[name] = match[1]
    return found


def version(root: Path) -> str:
    """Return the package's version."""
    return versions(root)["horovod_sparse/__init__.py"]


def version_problems(root: Path) -> list[str]:
    """Return the files, or names of files, whose version is not the package's."""
    expected = version(root)
    wrong = {place: found for place, found in versions(root).items() if found != expected}
    names = [path.name for path in root.glob("packaging/easybuild/*.eb") if f"-{expected}-" not in path.name]
    problems = [f"{place} has version {found}, not {expected}" for place, found in wrong.items()]
    return problems + [f"packaging/easybuild/{name} is not named after version {expected}" for name in names]


def changelog_problems(root: Path) -> list[str]:
    """Return what is wrong with the headings of the changelog: each version has one, with a date for the newest."""
    headings = re.findall(r"^## \[(.+?)\] - (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    names = [name for name, _ in headings]
    problems = [f"CHANGELOG.md has {names.count(name)} sections {name}" for name in {*names} if names.count(name) > 1]
    if headings and not re.fullmatch(r"\d{4}-\d\d-\d\d", headings[0][1]):
        problems.append(
            f"CHANGELOG.md calls version {headings[0][0]} {headings[0][1]!r}: give it the date of the release"
        )
    return problems


def git_problems(root: Path) -> list[str]:
    """Return changes that are not committed, and a tag that is missing."""
    problems, tag = [], f"v{version(root)}"
    if _git(root, "status", "--porcelain"):
        problems.append("the working tree has changes: commit them")
    if tag not in _git(root, "tag", "--points-at", "HEAD").splitlines():
        problems.append(f"this commit has no tag {tag}: git tag -a {tag}")
    return problems


def package_problems(root: Path) -> list[str]:
    """Return what is missing from dist/, or does not belong there."""
    names, prefix = [path.name for path in root.glob("dist/*")], f"horovod_sparse-{version(root)}"
    problems = [f"dist/{name} is of another version" for name in names if not name.startswith(prefix)]
    for kind, ending in (("source package", ".tar.gz"), ("wheel", ".whl")):
        if not [name for name in names if name.startswith(prefix) and name.endswith(ending)]:
            problems.append(f"dist/ has no {kind} of version {version(root)}: make wheel")
    return problems


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
