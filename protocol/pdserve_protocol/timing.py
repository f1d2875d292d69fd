"""Deadlines and intervals that processes must agree on, in seconds. Durations travel, never times of day."""

from __future__ import annotations

REQUEST_TIMEOUT_S = 600.0
PING_INTERVAL_S = 1.0
DEAD_AFTER_S = 3.0
STATE_INTERVAL_S = 0.5
OFFER_TO_GRANT_S = 30.0
OFFER_BEFORE_HALF_S = 2.0
NO_PROGRESS_S = 10.0
STOPPED_S = 2.0
REMEMBER_ENDED_S = 60.0
DRAIN_TIMEOUT_S = 30.0
CONNECT_S = 3.0
LINK_UP_S = 10.0
