"""Log probabilities of a prompt's tokens as answers show them: vLLM's prompt_logprobs, and the echo of completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_protocol.outputs import TokenLogprobs
from pdserve_text.detokenizer import IncrementalDetokenizer

from pdserve_router.openai_answers import PromptLogprob
from pdserve_router.output_processor import TokenEntry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str, *, skip_special_tokens: bool) -> list[int]:
    """For each token of a prompt the character of ``text``, which is what the answer repeats, at which it begins.

    Where the tokens' own text is longer than ``text``, the tokenizer has put special tokens before it.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    offsets, length = [], 0
    for token_id in token_ids:
        offsets.append(length)
        length += len(detokenizer.push((token_id,)))
    before = max(0, length - len(text))
    return [min(max(0, offset - before), len(text)) for offset in offsets]


def echo_entries(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
) -> list[TokenEntry]:
    """One entry per prompt token; the first has no log probability."""
    first = TokenEntry(TokenLogprobs(token_id=token_ids[0], logprob=0.0, rank=0), offsets[0], is_first_of_prompt=True)
    return [first, *map(TokenEntry, logprobs, offsets[1:])]


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, PromptLogprob] | None]:
    """For each prompt token but the first, which has none: itself and the ``num_top`` most probable ones, by id."""

    def shown(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return PromptLogprob(logprob=max(logprob, LOWEST_LOGPROB), rank=rank, decoded_token=text)

    answer: list[dict[str, PromptLogprob] | None] = [None]
    for token in logprobs:
        entries = {str(token.token_id): shown(token.token_id, token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top[:num_top], start=1):
            if token_id != token.token_id:
                entries[str(token_id)] = shown(token_id, logprob, rank)
        answer.append(entries)
    return answer
