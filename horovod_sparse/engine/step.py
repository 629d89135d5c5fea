"""A step of a model's exchange, and the states that it goes through."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from horovod_sparse.control.report import Position
from horovod_sparse.engine.bucket import Bucket


class State(Enum):
    """State of a step."""

    COLLECTING = "gradients are missing"
    EXCHANGING = "all gradients are available, and the exchange of all buckets was started"
    REDUCED = "gradients hold results that no optimizer has applied, and that the residuals depend on"
    APPLIED = "optimizers have applied the results, or nothing depends on them"
    SKIPPED = "the results were dropped, and the exchange was undone"


# A step that is collecting ends as reduced or applied after an error; in join(), it is applied once it was exchanged.
# If buckets are added while it is exchanging, it is collecting again.
_FOLLOWING = {
    State.COLLECTING: {State.EXCHANGING, State.REDUCED, State.APPLIED},
    State.EXCHANGING: {State.COLLECTING, State.REDUCED, State.APPLIED},
    State.REDUCED: {State.APPLIED, State.SKIPPED},
}


@dataclass(eq=False)
class ModelStep:
    """One step of all buckets.

    Attributes:
        number: Number of the step, from 0.
        state: The state; changed by ``enter`` only.
        started: Number of buckets whose exchange was started; the number of the next one.
        last_begun: Number of the bucket that began last; of several in flight together, that of the first.
        unapplied: Buckets whose exchange has begun, and whose result no optimizer has applied.
        awaits_optimizer: Whether no optimizer has taken a step since the exchange began; the same on all ranks,
            whichever shards they hold.
        complete: Time of the last gradient, in ns of ``time.perf_counter_ns``.
        error: The error that ended the exchange; None: none so far.
    """

    number: int
    state: State = State.COLLECTING
    started: int = 0
    last_begun: int = 0
    unapplied: list[Bucket] = field(default_factory=list)
    awaits_optimizer: bool = False
    complete: int = 0
    error: BaseException | None = None

    def enter(self, state: State) -> None:
        """Change the state."""
        assert state in _FOLLOWING.get(self.state, ()), f"a step cannot change from {self.state.name} to {state.name}"
        self.state = state

    @property
    def active(self) -> bool:
        """True until the exchange is finished."""
        return self.state in (State.COLLECTING, State.EXCHANGING)

    @property
    def position(self) -> Position:
        """Step and number of the bucket that starts next."""
        return (self.number, self.started) if self.state is State.COLLECTING else (self.number + 1, 0)
