"""PromptShare: how many prompt tokens a step may compute beside decodes.

A step that computes much of a prompt is long, and every stream in it waits for it. So prompts get what is left of a
target time, and some time also where decodes leave next to none: the share follows from how long the last steps took.
Knows nothing of requests, blocks or clocks.
"""

from __future__ import annotations

import numpy as np

UNMEASURED_TOKENS = 32
"""Beside decodes, while nobody can tell how long that takes."""

AIM = 0.95
"""Of the target: a stream also waits for what lies between two steps, and half of the steps are later than expected."""

LEAST = 0.25
"""Of the time of the decodes: what prompts get beside decodes that fill the target, so that they are not passed by all
who come later. Streams wait a quarter longer meanwhile."""

_FORGET = 0.05
"""What the past loses with each step."""

_BELIEF = 0.3
"""How many steps the last estimate counts as much as, which decides what steps do not tell: how much of their time is
due to what was the same in all of them."""

_PROBE_EVERY = 8
"""Steps whose decodes seem to fill the target, of which one has as little of prompts as possible: how long decodes take
shows beside different numbers of prompt tokens only."""

_UNIT = np.array([1.0, 16.0, UNMEASURED_TOKENS])
"""Steps of this kind are believed to be due to a third each, before anything is known."""


class PromptShare:
    """Told of every step that was computed, in order.

    A step is taken to last a time of its own, which is that of reading the weights, and one for each decode and each
    prompt token: three numbers, fitted to the last steps (least squares of errors relative to the time, so that a step
    that was held up says little; older steps count ever less) and held to what was estimated before.

    Args:
        target_s: how long a stream beside prompts is to wait for a token; None does not limit.
        min_tokens: what prompts get in any case.
    """

    def __init__(self, target_s: float | None, min_tokens: int) -> None:
        self._aim_s = None if target_s is None else AIM * target_s
        self._min_tokens = min_tokens
        self._parts_s = np.zeros(3)
        self._squares = np.zeros((3, 3))
        self._products_s = np.zeros(3)
        self._knows_decodes = self._knows_prompts = False
        self._num_observed = 0

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens took so long."""
        if seconds <= 0 or not num_decodes + num_prompt_tokens:
            return
        self._num_observed += 1
        self._knows_decodes |= num_decodes > 0
        self._knows_prompts |= num_prompt_tokens >= self._min_tokens
        step = np.array([1, num_decodes, num_prompt_tokens]) / _UNIT
        # One whose end was noticed late makes the next seem to take no time: that says no more than others.
        weight = max(seconds, float(step @ self._parts_s) / 2) ** -2
        self._squares = (1 - _FORGET) * self._squares + weight * np.outer(step, step)
        self._products_s = (1 - _FORGET) * self._products_s + weight * seconds * step
        belief = _BELIEF * weight * np.eye(3)
        self._parts_s = _least_squares(self._squares + belief, self._products_s + belief @ self._parts_s)

    def step_s(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """How long a step with so many tokens is expected to take; 0 before any was measured."""
        return float(np.array([1, num_decodes, num_prompt_tokens]) / _UNIT @ self._parts_s)

    def num_tokens(self, num_decodes: int, budget: int) -> int:
        """Prompt tokens that the next step may have beside so many decodes; ``budget`` where nothing waits for it."""
        share = self._share(num_decodes, budget)
        fills_target = self._aim_s is not None and self.step_s(num_decodes, 0) > self._aim_s
        if num_decodes and fills_target and self._num_observed % _PROBE_EVERY == 0:
            return min(share, self._min_tokens)
        return share

    def least_tokens_per_s(self, budget: int) -> float:
        """At which rate prompts get on beside however many decodes; 0 while nothing tells."""
        own_s, whole_s = self.step_s(0, 0), self.step_s(0, budget)
        if not self._knows_prompts or whole_s <= own_s:
            return 0.0
        return budget / whole_s if self._aim_s is None else LEAST / (1 + LEAST) * budget / (whole_s - own_s)

    def _share(self, num_decodes: int, budget: int) -> int:
        if not num_decodes or self._aim_s is None:
            return budget
        if not (self._knows_decodes and self._knows_prompts):
            return min(budget, max(self._min_tokens, UNMEASURED_TOKENS))
        decodes_s = self.step_s(num_decodes, 0)
        prompt_s = max(self._aim_s - decodes_s, LEAST * decodes_s)
        token_s = max(self._parts_s[2] / UNMEASURED_TOKENS, prompt_s / budget)
        return min(budget, max(self._min_tokens, int(prompt_s / token_s)))


def _least_squares(squares: np.ndarray, products: np.ndarray) -> np.ndarray:
    """The x >= 0 that fits best: what would be negative is left out, one after the other."""
    x = np.zeros(len(products))
    free = np.ones(len(products), dtype=bool)
    while free.any():
        x[free] = np.linalg.solve(squares[np.ix_(free, free)], products[free])
        if (x >= 0).all():
            break
        free[x.argmin()] = False
        x[~free] = 0.0
    return x
