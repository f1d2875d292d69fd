"""What time a prefill node promises when it offers a hand-off."""

from __future__ import annotations

_NEWEST_SHARE = 0.2


class RecentSpeed:
    """Promises follow the speed of the last steps; before the first step nothing is known, and 0 s is said."""

    def __init__(self) -> None:
        self._tokens_per_s = 0.0

    def eta_s(self, num_tokens: int) -> float:
        return num_tokens / self._tokens_per_s if self._tokens_per_s else 0.0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        speed = num_tokens / seconds
        weight = _NEWEST_SHARE if self._tokens_per_s else 1.0
        self._tokens_per_s += weight * (speed - self._tokens_per_s)
