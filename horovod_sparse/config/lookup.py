"""Lookup of a name, with an error that lists the known names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lookup(what: str, name: Any, known: Mapping[str, Any]) -> Any:
    """Return the value of a known name; raise ValueError for any other, which ``what`` describes in the message."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {what} {name!r}; known are: {', '.join(known)}")
    return known[name]
