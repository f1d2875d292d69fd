"""An attempt takes each position once, in order, and ends exactly once, however the two nodes' messages interleave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st
from pdserve_protocol.outputs import Aborted, Failed, Finished, HandedOver, RequestOutput, TokenLogprobs
from pdserve_router.errors import NodeFailed, NodeLost
from pdserve_router.lifecycle import AttemptLife, Half

if TYPE_CHECKING:
    from pdserve_protocol.outputs import End

P, D = Half.PREFILL, Half.DECODE
LENGTH = Finished(reason="length")
STOP = Finished(reason="stop", stop_token_id=2)


def both() -> AttemptLife:
    return AttemptLife({P: "p:1", D: "d:1"})


def output(position: int, *token_ids: int, end: End | None = None) -> RequestOutput:
    return RequestOutput(id="x", position=position, token_ids=list(token_ids), end=end)


def test_the_first_token_comes_from_whoever_says_it_first() -> None:
    for first, second in ((P, D), (D, P)):
        life = both()
        assert life.on_output(first, output(0, 7)).token_ids == [7]
        assert life.on_output(second, output(0, 7)).token_ids == []
        assert life.on_output(D, output(1, 8, end=LENGTH)).finished == LENGTH
        assert life.completed


def test_the_prefill_nodes_word_may_be_missing() -> None:
    life = both()
    assert life.on_output(D, output(0, 7, 8)).token_ids == [7, 8]
    assert life.on_output(D, output(2, 9, end=LENGTH)).finished == LENGTH


def test_the_decode_nodes_repetition_may_be_missing() -> None:
    life = both()
    assert life.on_output(D, output(1, 8, 9)).token_ids == []
    assert life.on_output(P, output(0, 7)).token_ids == [7, 8, 9]


def test_finished_before_the_first_token_is_in_waits_for_it() -> None:
    life = both()
    assert life.on_output(D, output(1, 8, end=LENGTH)).finished is None
    assert not life.ended
    progress = life.on_output(P, output(0, 7))
    assert (progress.token_ids, progress.finished) == ([7, 8], LENGTH)


def test_a_first_token_that_ends_the_output() -> None:
    # B45: the prefill node's only token is an end token; what becomes of the decode half does not matter.
    life = both()
    progress = life.on_output(P, output(0, 2, end=STOP))
    assert (progress.token_ids, progress.finished) == ([2], STOP)
    assert life.on_output(D, output(0, end=Aborted())).finished is None
    assert life.completed


def test_a_decode_half_that_is_not_needed_may_say_so_first() -> None:
    life = both()
    assert life.on_output(D, output(0, end=Aborted())).finished is None
    assert life.on_output(P, output(0, 2, end=STOP)).finished == STOP
    life = both()
    life.on_output(P, output(0, 7))
    life.on_output(D, output(0, end=Aborted()))
    with pytest.raises(NodeFailed):
        life.on_output(P, output(1, end=HandedOver()))


@pytest.mark.parametrize("first", [P, D])
def test_a_half_that_is_aborted_because_the_other_failed_leaves_it_to_say_why(first: Half) -> None:
    life = both()
    second = D if first is P else P
    assert life.on_output(first, output(0, end=Aborted())).finished is None
    with pytest.raises(NodeFailed, match="no way") as caught:
        life.on_output(second, output(0, end=Failed(code="handoff", message="no way")))
    assert caught.value.node_code == "handoff"
    life = both()
    life.on_output(first, output(0, end=Aborted()))
    with pytest.raises(NodeLost, match="by itself"):
        life.on_output(second, output(0, end=Aborted()))


def test_an_abort_that_nobody_asked_for_is_an_error() -> None:
    life = both()
    life.on_output(D, output(0, 7))
    with pytest.raises(NodeLost, match="by itself"):
        life.on_output(D, output(1, end=Aborted()))


def test_handing_over_is_not_the_end() -> None:
    life = both()
    assert life.on_output(P, output(0, 7)).token_ids == [7]
    assert life.on_output(P, output(1, end=HandedOver())).finished is None
    assert not life.ended


@pytest.mark.parametrize("half", [P, D])
@pytest.mark.parametrize("end", [Failed(code="handoff", message="no way"), Failed(code="internal", message="a fault")])
def test_a_half_that_fails_ends_the_attempt_once(half: Half, end: End) -> None:
    life = both()
    life.on_output(P, output(0, 7))
    with pytest.raises(NodeFailed, match=half.value):
        life.on_output(half, output(1, end=end))
    assert life.ended
    assert not life.completed
    assert life.open_halves == {P, D} - {half}
    other = D if half is P else P
    assert life.on_output(other, output(1, 8, end=Failed(code="internal", message="too"))).token_ids == []


def test_a_prefill_node_that_dies_after_the_decode_node_speaks_takes_nothing_along() -> None:
    life = both()
    life.on_output(D, output(0, 7))
    life.on_lost(P, NodeLost("p"))
    assert life.on_output(D, output(1, 8, end=LENGTH)).finished == LENGTH


def test_a_node_that_dies_ends_the_attempt() -> None:
    for half in (P, D):
        life = both()
        life.on_output(P, output(0, 7))
        with pytest.raises(NodeLost):
            life.on_lost(half, NodeLost("p"))
        life.on_lost(half, NodeLost("p"))


def test_a_hole_that_nobody_can_fill_is_an_error_not_a_hang() -> None:
    life = both()
    life.on_output(D, output(1, 8, end=LENGTH))
    with pytest.raises(NodeFailed, match="before the output was complete"):
        life.on_output(P, output(0, end=HandedOver()))
    life = both()
    life.on_output(D, output(1, 8, end=LENGTH))
    with pytest.raises(NodeLost):
        life.on_lost(P, NodeLost("p"))


def test_nothing_is_reported_after_a_stop() -> None:
    life = both()
    life.on_output(P, output(0, 7))
    life.stop()
    assert life.on_output(D, output(0, 7, 8, end=LENGTH)).finished is None
    assert not life.completed
    assert life.open_halves == {P}


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[tuple[Half, RequestOutput]], list[int], End]:
    """What two nodes may say about one output, interleaved, doubled and cut as they like; the last may be a failure."""
    tokens = draw(st.lists(st.integers(0, 999), min_size=1, max_size=12))
    finish: End = draw(st.sampled_from([LENGTH, STOP]))
    prefill = [output(0, tokens[0])] if draw(st.booleans()) else []
    prefill.append(output(1, end=HandedOver()))
    start = draw(st.integers(0, 1)) if len(prefill) == 2 else 0
    if start == 1 and len(tokens) == 1:
        start = 0
    cuts = sorted(draw(st.sets(st.integers(start + 1, len(tokens)), max_size=5)) | {len(tokens)})
    decode = []
    for low, high in zip([start, *cuts], cuts, strict=False):
        last = high == len(tokens)
        decode.append(output(low, *tokens[low:high], end=finish if last else None))
        if not last and draw(st.booleans()):
            decode.append(decode[-1])
    if draw(st.booleans()):
        failed = Failed(code="internal", message="a fault")
        decode[-1] = output(decode[-1].position, end=failed)
        finish = failed
    merged: list[tuple[Half, RequestOutput]] = []
    queues = {P: prefill, D: decode}
    while any(queues.values()):
        half = draw(st.sampled_from([h for h in queues if queues[h]]))
        merged.append((half, queues[half].pop(0)))
    return merged, tokens, finish


@given(conversations())
def test_every_position_once_in_order_and_one_end(
    conversation: tuple[list[tuple[Half, RequestOutput]], list[int], End],
) -> None:
    said, tokens, finish = conversation
    life = both()
    seen: list[int] = []
    ends: list[object] = []
    for half, item in said:
        try:
            progress = life.on_output(half, item)
        except NodeFailed as error:
            ends.append(error.node_code)
            continue
        if progress.token_ids or progress.finished:
            assert not ends, "something was reported after the end"
        seen += progress.token_ids
        if progress.finished is not None:
            ends.append(progress.finished)
    assert seen == tokens[: len(seen)]
    assert ends == [finish if isinstance(finish, Finished) else "internal"]
    if isinstance(finish, Finished):
        assert seen == tokens
    assert not life.open_halves


@given(st.permutations(range(6)))
def test_log_probabilities_stay_with_their_tokens(order: list[int]) -> None:
    life = AttemptLife({D: "d:1"})
    seen: list[int] = []
    for position in order:
        logprobs = [TokenLogprobs(token_id=position, logprob=-1.0, rank=1)]
        progress = life.on_output(D, RequestOutput(id="x", position=position, token_ids=[position], logprobs=logprobs))
        assert [item.token_id for item in progress.logprobs] == progress.token_ids
        seen += progress.token_ids
    assert seen == list(range(6))
