"""StepPace: how long steps take, and when the next one should be queued behind the one under way.

A queued step is computed at once when the one before it ends, without waiting for the loop; but what arrives after it
was queued has to wait for it too. So it is queued late: shortly before the step under way is expected to end. Knows
nothing of requests; whoever uses it passes the time, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

# Long enough to schedule a step and to be off by some percent, short enough that few arrive in it.
LEAD_S = 0.002
LEAD_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step that was computed: its tokens, and the seconds in which the device did nothing else."""

    num_tokens: int
    seconds: float


class StepPace:
    """Told of each step when it is begun and when it is over, in order.

    Attributes:
        last: the last step that was computed; None before the first, and after one that was not.
    """

    def __init__(self) -> None:
        self.last: StepTime | None = None
        self._in_flight: deque[tuple[int, float]] = deque()
        self._ended_at = -inf

    @property
    def queue_at(self) -> float:
        """From when on another step may be begun, if there is something to compute.

        At once without a step in flight; never with two, or while nobody can tell how long the one under way takes. It
        takes as long as the last one, if that had as many tokens.
        """
        if not self._in_flight:
            return -inf
        num_tokens, begun_at = self._in_flight[0]
        if len(self._in_flight) > 1 or self.last is None or self.last.num_tokens != num_tokens:
            return inf
        lead = LEAD_S + LEAD_SHARE * self.last.seconds
        return max(begun_at, self._ended_at) + self.last.seconds - lead

    def begun(self, num_tokens: int, now: float) -> None:
        """A step was given to the device, which comes to it when it has done those before."""
        self._in_flight.append((num_tokens, now))

    def ended(self, now: float, *, computed: bool) -> None:
        """The oldest step is over; ``computed``: to its end."""
        num_tokens, begun_at = self._in_flight.popleft()
        self.last = StepTime(num_tokens, now - max(begun_at, self._ended_at)) if computed else None
        self._ended_at = now
