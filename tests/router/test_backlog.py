"""What is sent to nodes and not done with comes to nothing, whatever happens to attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, strategies as st
from pdserve_router.backlog import LEAST_SHARE, Backlog

if TYPE_CHECKING:
    from collections.abc import Sequence

NODES = ("p1", "p2", "d1", "d2")


def test_a_prompt_is_pending_until_its_first_token_and_a_stream_open_until_its_end() -> None:
    backlog = Backlog()
    backlog.opened("a", ["p1", "d1"], prefiller="p1", num_tokens=100)
    backlog.opened("b", ["d1"], prefiller="d1", num_tokens=7)
    assert (backlog.pending_tokens("p1"), backlog.pending_tokens("d1")) == (100, 7)
    assert (backlog.attempts("p1"), backlog.attempts("d1"), backlog.attempts("p2")) == (1, 2, 0)
    backlog.started("a")
    backlog.started("a")
    assert backlog.pending_tokens("p1") == 0
    assert backlog.attempts("p1") == 1
    backlog.closed("a")
    assert (backlog.attempts("p1"), backlog.attempts("d1")) == (0, 1)


def test_the_share_that_is_computed_is_smoothed_and_starts_at_all() -> None:
    backlog = Backlog()
    shares = [backlog.computed_share("p1")]
    for computed in [1000, *[0] * 30, None, -5, 10**9]:
        backlog.opened("a", ["p1", "d1"], prefiller="p1", num_tokens=1000)
        backlog.started("a", computed)
        backlog.started("a", 1000)
        backlog.closed("a")
        shares.append(backlog.computed_share("p1"))
    assert shares[:2] == [1.0, 1.0]
    assert 0.4 < shares[2] < 0.5
    assert shares[31:34] == [LEAST_SHARE] * 3
    assert LEAST_SHARE < shares[34] < 0.3
    assert backlog.computed_share("d1") == 1.0


def test_a_fork_says_nothing_of_what_is_cached() -> None:
    backlog = Backlog()
    backlog.opened("a", ["d1"], prefiller="d1", num_tokens=0)
    assert backlog.pending_attempts("d1") == 1
    backlog.started("a", 1)
    assert (backlog.pending_attempts("d1"), backlog.computed_share("d1")) == (0, 1.0)


actions = st.tuples(
    st.sampled_from(["open", "start", "close"]),
    st.integers(0, 9),
    st.lists(st.sampled_from(NODES), min_size=1, max_size=2, unique=True),
    st.integers(0, 1000),
)


@given(history=st.lists(actions, max_size=40))
def test_nothing_is_left_and_nothing_is_ever_negative(history: Sequence[tuple[str, int, list[str], int]]) -> None:
    backlog = Backlog()
    opened: dict[str, tuple[str, int]] = {}
    waiting: dict[str, str] = {}
    for action, number, nodes, num_tokens in history:
        id = str(number)
        if action == "open" and id not in opened:
            backlog.opened(id, nodes, prefiller=nodes[0], num_tokens=num_tokens)
            opened[id] = (nodes[0], num_tokens)
            waiting[id] = nodes[0]
        elif action == "start":
            backlog.started(id)
            waiting.pop(id, None)
            if id in opened:
                opened[id] = (opened[id][0], 0)
        elif action == "close":
            backlog.closed(id)
            opened.pop(id, None)
            waiting.pop(id, None)
        for node in NODES:
            assert backlog.pending_tokens(node) == sum(num for where, num in opened.values() if where == node)
            assert backlog.pending_attempts(node) == list(waiting.values()).count(node)
    for id in opened:
        backlog.closed(id)
    assert not any(
        backlog.pending_tokens(node) or backlog.pending_attempts(node) or backlog.attempts(node) for node in NODES
    )
