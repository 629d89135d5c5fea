"""Signatures of a library that is not imported here: a program that another Python runs, with questions in JSON.

CuPy's functions in C have no signature that Python could read, but the first line of their docstring shows it.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature without annotations."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        found = re.match(r"[\w.]+\((.*)\)", (function.__doc__ or "").strip().replace("\\", ""))
        assert found, f"{function} documents no signature"
        text = re.sub(r"(^|, )[\w ]+ (?=\w+(=|,|$))", r"\1", found[1])  # without C's types
        signature = inspect.signature(eval(f"lambda {text}: None"))  # noqa: S307 - it is the library's
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)


def differences(module: Any, expected: dict[str, str | None]) -> list[str]:
    """Return what differs from the expected signatures, by dotted name; None: anything of this name will do."""
    found = {name: named(module, name) for name in expected}
    missing = [f"{name} is missing" for name, one in found.items() if one is None]
    texts = {name: str(signature_of(one)) for name, one in found.items() if one is not None and expected[name]}
    return missing + [f"{name}{text}, not {expected[name]}" for name, text in texts.items() if text != expected[name]]


def refused(module: Any, calls: list[tuple[str, int, list[str]]]) -> list[str]:
    """Return the calls, of a name with so many positional arguments and these keywords, that raise TypeError."""

    def error(name: str, count: int, keywords: list[str]) -> list[str]:
        try:
            signature_of(named(module, name)).bind(*[None] * count, **dict.fromkeys(keywords))
        except TypeError as error:
            return [f"{name}: {error}"]
        return []

    return [message for call in calls for message in error(*call)]


def named(module: Any, name: str) -> Any:
    """Return what has a dotted name in a module; None if there is nothing."""
    for part in name.split(".") if name else ():
        module = getattr(module, part, None)
    return module


def ask(question: Callable[..., list[str]], given: Any) -> list[str]:
    """Return the answer of a function of this module about the CuPy that is installed."""
    command = [sys.executable, "-c", Path(__file__).read_text(), question.__name__, json.dumps(given)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    answer: list[str] = json.loads(run.stdout)
    return answer


if __name__ == "__main__":
    import cupy

    print(json.dumps(globals()[sys.argv[1]](cupy, json.loads(sys.argv[2]))))
