"""When a prefill node offers a hand-off, and what time it promises."""

from __future__ import annotations

_NEWEST_SHARE = 0.2


class OfferWhenScheduled:
    """Offers every prompt as soon as it is being computed, that is, with all its blocks reserved.

    So the receiver reserves memory only for a prompt that is on its way, and a grant never waits for room here. What is
    promised follows the speed of the last steps.
    """

    def __init__(self) -> None:
        self._tokens_per_s = 0.0

    def may_offer(self, num_open: int) -> bool:
        return True

    def eta_s(self, num_tokens: int) -> float:
        return num_tokens / self._tokens_per_s if self._tokens_per_s else 0.0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        speed = num_tokens / seconds
        weight = _NEWEST_SHARE if self._tokens_per_s else 1.0
        self._tokens_per_s += weight * (speed - self._tokens_per_s)
