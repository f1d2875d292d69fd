"""Tokens to text: whole characters, stop strings that never leak, log probabilities that end where the text does."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from pdserve_protocol.outputs import Finished
from pdserve_router.output_processor import OutputProcessor
from pdserve_text.tokenizer import Tokenizer
from support.fake_node import made_up_logprobs
from support.tokenizers import EOS_ID, tiny_tokenizer_files

TOKENIZER = Tokenizer.from_files(tiny_tokenizer_files())
LENGTH = Finished(reason="length")
STOP = Finished(reason="stop", stop_token_id=EOS_ID)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def run(
    token_ids: list[int], end: Finished, stop: tuple[str, ...] = (), *, logprobs: bool = False, min_tokens: int = 0
) -> tuple[str, str, list[int], int]:
    """Text, reason, shown entries' token ids, and count, one token at a time."""
    processor = OutputProcessor(TOKENIZER, stop=stop, with_logprobs=logprobs, min_tokens=min_tokens)
    text, shown = "", []
    for i, token_id in enumerate(token_ids):
        finished = end if i == len(token_ids) - 1 else None
        delta = processor.process([token_id], [made_up_logprobs(token_id, 0)] if logprobs else [], finished)
        text += delta.text
        shown += [entry.logprobs.token_id for entry in delta.entries]
        if delta.reason is not None:
            return text, delta.reason, shown, processor.num_tokens
    raise AssertionError("no end")


@pytest.mark.parametrize("logprobs", [False, True])
def test_characters_are_never_split(logprobs: bool) -> None:
    # B87
    text = "\U0001f468\u200d\U0001f469\u200d\U0001f467 東京 é"
    assert run(ids(text), LENGTH, logprobs=logprobs)[:2] == (text, "length")


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_an_unfinished_character_at_the_end_is_dropped(stop: tuple[str, ...]) -> None:
    # B88
    token_ids = ids("a\U0001f468")
    texts = [run(token_ids[:n], LENGTH, stop)[0] for n in range(1, len(token_ids) + 1)]
    assert texts[0] == "a"
    assert texts[-1] == "a\U0001f468"
    assert not any("�" in text for text in texts)


def test_an_end_token_is_counted_and_has_no_text() -> None:
    # B45
    assert run([EOS_ID], STOP, logprobs=True) == ("", "stop", [], 1)
    assert run([*ids("hi"), EOS_ID], STOP)[:2] == ("hi", "stop")
    # A stop id may be any token: its text is not shown either.
    assert run(ids("a!"), Finished(reason="stop", stop_token_id=ids("!")[0]))[0] == "a"


@pytest.mark.parametrize(
    ("stop", "shown", "reason"),
    [
        (("beta gamma",), "alpha ", "stop"),
        (("a beta g",), "alph", "stop"),
        (("beta gamma delta!", "beta gamma"), "alpha ", "stop"),
        (("alpha",), "", "stop"),
        (("delta!",), "alpha beta gamma delta", "length"),
    ],
)
def test_stop_strings_over_several_tokens(stop: tuple[str, ...], shown: str, reason: str) -> None:
    # B90: neither the stop string nor its beginning is shown; what only looked like one is.
    assert run(ids("alpha beta gamma delta"), LENGTH, stop)[:2] == (shown, reason)


def test_log_probabilities_end_where_the_text_does() -> None:
    # B92
    token_ids = ids("one two three")
    text, reason, shown, count = run(token_ids, LENGTH, (" three",), logprobs=True)
    assert (text, reason) == ("one two", "stop")
    assert TOKENIZER.decode(shown) == text
    assert count == len(token_ids), "tokens of the stop string were generated and count"


def test_log_probabilities_do_not_outrun_a_stop_string_that_begins_inside_a_character() -> None:
    shown = run(ids("a\U0001f468b"), LENGTH, ("\U0001f468",), logprobs=True)[2]
    assert shown == ids("a")


def test_stop_strings_wait_for_min_tokens() -> None:
    # B74
    token_ids = ids("a!b!c")
    text, reason, _, count = run(token_ids, LENGTH, ("!",), min_tokens=3)
    assert (text, reason) == ("a!b", "stop")
    assert count > 3


@given(st.text(alphabet="ab é東\U0001f468", max_size=30), st.lists(st.text("ab é", min_size=1, max_size=3), max_size=3))
def test_any_cut_shows_the_same(text: str, stop: list[str]) -> None:
    token_ids = ids(text)
    if not token_ids:
        return
    whole = OutputProcessor(TOKENIZER, stop=stop).process(token_ids, [], LENGTH)
    assert run(token_ids, LENGTH, tuple(stop), logprobs=True)[:2] == (whole.text, whole.reason)
    found = [text.find(s) + len(s) for s in stop if s in text]
    assert whole.reason == ("stop" if found else "length")
    if not found:
        assert whole.text == text
