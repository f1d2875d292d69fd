"""PromptShare: how many prompt tokens a step may compute beside decodes.

A step that computes much of a prompt is long, and every stream in it waits for it. So prompts get what is left of a
target time: the share follows from how long the last steps took. Knows nothing of requests, blocks or clocks.
"""

from __future__ import annotations

UNMEASURED_TOKENS = 32
"""Beside decodes, while nobody can tell how long that takes."""

AIM = 0.95
"""Of the target: a stream also waits for what lies between two steps, and half of the steps are later than expected."""

_NEWEST_SHARE = 0.2
_LONGEST_SURPRISE = 2.0


class PromptShare:
    """Told of every step that was computed, in order.

    A step is taken to last ``decode_s`` + its prompt tokens x ``token_s``. Steps of one kind alone say what their part
    is. What a mixed step took longer or shorter than expected is put down to both parts, by the squares of their sizes:
    so steps come to last as expected even while there are prompts in all of them.

    Args:
        target_s: how long a stream beside prompts is to wait for a token; None does not limit.
        min_tokens: what prompts get in any case, so that they always go on.

    Attributes:
        decode_s: seconds of a step apart from its prompt tokens; None before any was measured.
        token_s: seconds of a prompt token; None before any was measured.
    """

    def __init__(self, target_s: float | None, min_tokens: int) -> None:
        self.decode_s: float | None = None
        self.token_s: float | None = None
        self._aim_s = None if target_s is None else AIM * target_s
        self._min_tokens = min_tokens

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens took so long."""
        if seconds <= 0:
            return
        if not num_prompt_tokens:
            self.decode_s = _follow(self.decode_s, seconds)
        elif num_decodes:
            self._observe_mixed(num_prompt_tokens, seconds)
        elif num_prompt_tokens >= self._min_tokens:
            self.token_s = _follow(self.token_s, seconds / num_prompt_tokens)

    def num_tokens(self, num_decodes: int, budget: int) -> int:
        """Prompt tokens that the next step may have beside so many decodes; ``budget`` where nothing waits for it."""
        if not num_decodes or self._aim_s is None:
            return budget
        if self.decode_s is None or self.token_s is None:
            return min(budget, max(self._min_tokens, UNMEASURED_TOKENS))
        return min(budget, max(self._min_tokens, int((self._aim_s - self.decode_s) / self.token_s)))

    def tokens_per_s(self, num_decodes: int, budget: int) -> float:
        """At which rate prompts get on in steps with so many decodes; 0 before any was measured."""
        num_tokens = self.num_tokens(num_decodes, budget)
        if self.token_s is None:
            return 0.0
        return num_tokens / ((self.decode_s or 0.0) + num_tokens * self.token_s)

    def _observe_mixed(self, num_prompt_tokens: int, seconds: float) -> None:
        decode_s = seconds / 2 if self.decode_s is None else self.decode_s
        token_s = self.token_s or max(seconds - decode_s, seconds / 10) / num_prompt_tokens
        of_prompt = num_prompt_tokens * token_s
        expected = decode_s + of_prompt
        blame = decode_s**2 + of_prompt**2
        missed = _NEWEST_SHARE * (min(seconds, _LONGEST_SURPRISE * expected) - expected)
        self.decode_s = decode_s + missed * decode_s**2 / blame
        self.token_s = token_s + missed * of_prompt**2 / blame / num_prompt_tokens


def _follow(estimate: float | None, seconds: float) -> float:
    """The estimate, moved towards what was measured; a step that was held up once does not move it far."""
    if estimate is None:
        return seconds
    return estimate + _NEWEST_SHARE * (min(seconds, _LONGEST_SURPRISE * estimate) - estimate)
