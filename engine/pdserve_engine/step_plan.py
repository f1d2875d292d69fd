"""StepPlan: who gets how many tokens in the step being made.

Owns what is left of the step's limits while the scheduler goes through its queues. Knows nothing of blocks or order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve_engine.request import Request


class StepPlan:
    """Shares of the budget, in batch order, and rows of logits with them.

    Args:
        budget: tokens of the step.
        num_prompt_tokens: of these, for requests that miss more than the one token to go on from.
        num_rows: rows of logits.
    """

    def __init__(self, budget: int, num_prompt_tokens: int, num_rows: int) -> None:
        self.budget = budget
        self.num_prompt_tokens = num_prompt_tokens
        self.num_rows = num_rows
        self.scheduled: dict[Request, int] = {}

    def share(self, request: Request) -> int:
        """How many tokens it may have."""
        num_tokens = min(request.num_remaining, self.budget)
        if request.num_remaining > 1:
            num_tokens = min(num_tokens, self.num_prompt_tokens)
        if request.sampling.prompt_logprobs is None:
            return num_tokens if self.num_rows else 0
        return num_tokens if request.num_logits_rows(num_tokens) <= self.num_rows else self.num_rows

    def add(self, request: Request, num_tokens: int) -> None:
        """The request takes part, with ``num_tokens`` > 0."""
        self.scheduled[request] = num_tokens
        self._change(request, num_tokens, -1)

    def drop(self, request: Request) -> None:
        """The request does not take part, if it did."""
        num_tokens = self.scheduled.pop(request, 0)
        if num_tokens:
            self._change(request, num_tokens, 1)

    def _change(self, request: Request, num_tokens: int, sign: int) -> None:
        self.budget += sign * num_tokens
        self.num_rows += sign * request.num_logits_rows(num_tokens)
        if request.num_remaining > 1:
            self.num_prompt_tokens += sign * num_tokens
