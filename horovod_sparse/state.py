"""What has no state still answers when asked for it: checkpoints need no special case."""

from __future__ import annotations

from typing import Any


class Stateless:
    """Gives and takes an empty state."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the next step depends on the configuration alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes an empty state; ValueError for any other, which belongs to another class."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but the state to load holds {sorted(state)}")
