"""How the tokens of one request are chosen."""

from __future__ import annotations

from typing import Literal

from pdserve_protocol.codec import Record


class Grammar(Record, frozen=True):
    """What an output must look like; ``pdserve_text.grammar`` says what ``source`` is for each kind."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    source: str = ""


class SamplingParams(Record, frozen=True):
    """Sampling parameters of one request, already validated and with every default filled in.

    Randomness is counter-based: the random number of a token is a function of (seed, choice, output position) alone, so
    that any node, at any time, draws the same one.

    Attributes:
        max_tokens: output tokens at most, >= 1.
        min_tokens: end ids and stop ids cannot be chosen before this many output tokens.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability is at least this; in (0, 1].
        min_p: drop tokens less probable than this times the most probable one; in [0, 1].
        presence_penalty: subtracted once from the logit of every token already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output
            (Keskar et al., CTRL, 2019); 1 is off.
        seed: 64 bits; the router draws one where the client gave none.
        stop_token_ids: ids that end the output beside the model's end ids.
        ignore_eos: the model's end ids do not end the output (stop_token_ids still do).
        logit_bias: added to the logits, by token id.
        logprobs: number of most probable tokens to report beside the chosen one; None reports nothing.
        grammar: tokens that it does not allow are not chosen.
        prompt_logprobs: as ``logprobs``, for every prompt token but the first; all of the prompt is computed then, even
            if some of it is cached.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
