"""Copies of a state, as ``state_dict`` gives it, for a step that may have to be undone."""

from __future__ import annotations

from typing import Any


def snapshot(state: dict[str, Any], earlier: dict[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a state: later steps do not change it.

    Args:
        state: Nested dictionaries of arrays, on whatever device, and of what never changes in place.
        earlier: A copy that is no longer needed; its arrays are used again where they fit, as fresh memory costs a page
            fault every 4 KiB.

    Returns:
        The copy, each array on its own device.
    """
    earlier = earlier or {}
    return {key: _copy(value, earlier.get(key)) for key, value in state.items()}


def _copy(value: Any, earlier: Any) -> Any:
    if isinstance(value, dict):
        return snapshot(value, earlier)
    if not hasattr(value, "dtype"):
        return value
    if getattr(earlier, "shape", None) != value.shape or earlier.dtype != value.dtype:
        return value.copy()
    earlier[...] = value
    return earlier
