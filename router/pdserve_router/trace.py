"""What happened to one request and when; log lines and metrics are derived from it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve_router.metrics import RouterMetrics
    from pdserve_router.proof import Proof

log = logging.getLogger("pdserve_router.requests")


class RequestTrace:
    """Times are seconds of the monotonic clock. ``end`` is the finish reason, or why there was none.

    Attributes:
        status: of the HTTP answer; 499 where the client had gone.
    """

    def __init__(self, endpoint: str, request_id: str, metrics: RouterMetrics) -> None:
        self.endpoint = endpoint
        self.request_id = request_id
        self._metrics = metrics
        self.arrived = time.monotonic()
        self._first_token: float | None = None
        self._last_token = 0.0
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.status = 500
        self.end = "internal"
        self.proof: Proof | None = None

    def on_tokens(self, count: int) -> None:
        """``count`` tokens came from the nodes."""
        now = time.monotonic()
        if self._first_token is None:
            self._first_token = now
            self._metrics.ttft.observe(now - self.arrived)
            count -= 1
            self.num_output_tokens += 1
        if count > 0:
            gap = (now - self._last_token) / count if self._last_token else 0.0
            for _ in range(count):
                self._metrics.itl.observe(gap)
            self.num_output_tokens += count
        self._last_token = now

    def on_end(self) -> None:
        """The request is over: count it and say so."""
        now = time.monotonic()
        metrics = self._metrics
        metrics.e2e.observe(now - self.arrived)
        metrics.generated_tokens.inc(self.num_output_tokens)
        metrics.requests.labels(self.endpoint, self.end, str(self.status)).inc()
        proof = self.proof
        if proof is not None:
            metrics.observe_proof(proof, self.num_prompt_tokens)
        log.info(
            "request %s: %s %d %s, prompt %d, output %d, ttft %s, total %.1f ms%s",
            self.request_id,
            self.endpoint,
            self.status,
            self.end,
            self.num_prompt_tokens,
            self.num_output_tokens,
            "-" if self._first_token is None else f"{(self._first_token - self.arrived) * 1000:.1f} ms",
            (now - self.arrived) * 1000,
            "" if proof is None else f", {proof.mode}, prefill {proof.prefill_node}, decode {proof.decode_node}",
        )
