"""Tokens of one output become text: incremental detokenization, stop strings, log probabilities.

Rule for what is counted and shown: usage counts every generated token, also an end token and the tokens of a matched
stop string; text and log probabilities hold neither, unless the client wants the stop included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from pdserve_text.detokenizer import IncrementalDetokenizer
from pdserve_text.stop import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.outputs import Finished, FinishReason, TokenLogprobs
    from pdserve_text.tokenizer import Tokenizer


@dataclass(slots=True)
class TokenEntry:
    """Log probabilities of one token and the character of the answer's text at which it begins.

    ``is_first_of_prompt``: it has no log probabilities.
    """

    logprobs: TokenLogprobs
    text_offset: int
    is_first_of_prompt: bool = False


class Delta(msgspec.Struct):
    """What can be shown now. ``reason`` is set in the last one; ``stopped`` where a stop string ended the output."""

    text: str = ""
    entries: list[TokenEntry] = []
    reason: FinishReason | None = None
    stopped: bool = False


class OutputProcessor:
    """One output (one choice).

    Args:
        stop: strings that end the output and are not part of it.
        min_tokens: stop strings are not looked for in the text of the first so many tokens.
        with_logprobs: the tokens come with log probabilities.
        include_stop: the stop string, or the token, that ended the output is a part of its text.
        skip_special_tokens: special tokens have no text.
        text_offset: characters of the answer's text before this output.

    Attributes:
        num_tokens: generated tokens so far.
        with_logprobs: as given.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        with_logprobs: bool = False,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
        text_offset: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        self._stop = StopStrings(stop) if stop else None
        self._min_tokens = min_tokens
        self.with_logprobs = with_logprobs
        self._include_stop = include_stop
        self._pending: list[TokenEntry] = []
        self._made = self._shown = text_offset
        self.num_tokens = 0

    def process(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finished: Finished | None = None
    ) -> Delta:
        """Take the next tokens; with ``finished`` they are the last ones.

        Its reason "stop" means that the last token is an end token, which is no text unless it was asked for.
        """
        ends_itself = finished is not None and finished.reason == "stop" and not self._include_stop
        if self._stop is None and not self.with_logprobs:
            self.num_tokens += len(token_ids)
            text = self._detokenizer.push(token_ids[:-1] if ends_itself else token_ids)
            if finished is None:
                return Delta(text)
            return Delta(text, reason=finished.reason)
        parts: list[str] = []
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if ends_itself and i == last:
                break
            if self.with_logprobs:
                self._pending.append(TokenEntry(logprobs[i], self._made))
            shown, matched = self._push(token_id)
            parts.append(shown)
            if matched:
                text = "".join(parts)
                return Delta(text, self._released(text), "stop", stopped=True)
        if finished is None:
            text = "".join(parts)
            return Delta(text, self._released(text))
        if self._stop is not None:
            parts.append(self._stop.flush())
        entries, self._pending = self._pending, []
        return Delta("".join(parts), entries, finished.reason)

    def _push(self, token_id: int) -> tuple[str, bool]:
        text = self._detokenizer.push((token_id,))
        self._made += len(text)
        if self._stop is None or self.num_tokens <= self._min_tokens:
            return text, False
        shown, matched = self._stop.push(text)
        if matched is not None and self._include_stop:
            shown += matched
        return shown, matched is not None

    def _released(self, text: str) -> list[TokenEntry]:
        """Entries of tokens of which something has been shown; the others may yet be cut off by a stop string."""
        self._shown += len(text)
        if not self._pending:
            return []
        count = next(
            (i for i, entry in enumerate(self._pending) if entry.text_offset >= self._shown), len(self._pending)
        )
        released, self._pending = self._pending[:count], self._pending[count:]
        return released
