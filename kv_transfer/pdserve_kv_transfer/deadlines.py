"""How long the hand-off state machines wait. The defaults are the protocol's; tests and operators may choose others."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve_protocol import timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """Seconds.

    Attributes:
        offer_to_grant_s: a finished prompt without a grant fails.
        offer_before_half_s: an offer whose request is not here yet is refused.
        no_progress_s: a write that does not end fails, and so does a hand-off after its last Sent while nothing lands.
        stopped_s: a cancelled sender that says nothing of it is fenced off; one whose writes are under way and that
            says so has ``no_progress_s``.
        remember_ended_s: ids are remembered after their end.
        dead_after_s: silence that ends a link.
        state_interval_s: between two States.
        connect_s: from LinkHello until the link is up.
    """

    offer_to_grant_s: float = timing.OFFER_TO_GRANT_S
    offer_before_half_s: float = timing.OFFER_BEFORE_HALF_S
    no_progress_s: float = timing.NO_PROGRESS_S
    stopped_s: float = timing.STOPPED_S
    remember_ended_s: float = timing.REMEMBER_ENDED_S
    dead_after_s: float = timing.DEAD_AFTER_S
    state_interval_s: float = timing.STATE_INTERVAL_S
    connect_s: float = timing.LINK_UP_S
