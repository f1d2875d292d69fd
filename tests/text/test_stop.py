"""Stop strings (B90): no part of one is emitted, all text before it is, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from pdserve_text.stop import StopStrings


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    watcher = StopStrings(stops)
    emitted = ""
    for chunk in chunks:
        text, stop = watcher.push(chunk)
        emitted += text
        if stop is not None:
            assert watcher.push("more") == ("", stop)
            assert watcher.flush() == ""
            return emitted, stop
    return emitted + watcher.flush(), None


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition, read literally: try every end, the longest stop string first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "chunks", "expected"),
    [
        # B90
        (["beta gamma"], ["alpha", " beta", " gamma", " delta"], ("alpha ", "beta gamma")),
        (["beta gamma"], ["alpha be", "ta", " ", "gam", "ma"], ("alpha ", "beta gamma")),
        (["ab", "abc"], ["xab", "c"], ("x", "ab")),
        (["abc", "ab"], ["xabc"], ("x", "ab")),
        (["b", "ab"], ["xab"], ("x", "ab")),
        (["first"], ["first", " rest"], ("", "first")),
        (["beta gamma"], ["alpha beta ga"], ("alpha beta ga", None)),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["👩\u200d👧"], ["x👩", "\u200d", "👧y"], ("x", "👩\u200d👧")),
        ([], ["alpha"], ("alpha", None)),
    ],
)
def test_examples(stops: list[str], chunks: list[str], expected: tuple[str, str | None]) -> None:
    assert run(stops, chunks) == expected


def test_the_tail_that_may_become_a_stop_string_is_held_and_flushed() -> None:  # B90
    watcher = StopStrings(["beta gamma"])
    assert watcher.push("alpha beta") == ("alpha ", None)
    assert watcher.push(" g") == ("", None)
    assert watcher.push("reen b") == ("beta green ", None)
    assert watcher.flush() == "b"
    assert watcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


short_texts = st.text(alphabet="abc", min_size=1, max_size=4)


@settings(derandomize=True, database=None, deadline=None, max_examples=120)
@given(stops=st.lists(short_texts, max_size=4), chunks=st.lists(st.text(alphabet="abc", max_size=5), max_size=6))
def test_any_cut_gives_what_the_whole_text_gives(stops: list[str], chunks: list[str]) -> None:  # B90
    assert run(stops, chunks) == reference(stops, "".join(chunks))


@settings(derandomize=True, database=None, deadline=None, max_examples=120)
@given(stops=st.lists(short_texts, min_size=1, max_size=3), text=st.text(alphabet="abc", max_size=12))
def test_nothing_is_held_without_need(stops: list[str], text: str) -> None:
    watcher = StopStrings(stops)
    emitted = ""
    for end, character in enumerate(text, 1):
        new, stop = watcher.push(character)
        emitted += new
        if stop is not None:
            return
        undecided = [k for s in stops for k in range(len(s)) if text[:end].endswith(s[:k])]
        assert emitted == text[: end - max(undecided)]
