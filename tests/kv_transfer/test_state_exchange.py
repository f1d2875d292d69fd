"""Which States count, and which absence means an end."""

from __future__ import annotations

from pdserve_kv_transfer.state_exchange import StateExchange
from pdserve_protocol.handoff import Offer, State

OFFER = Offer(id="a", num_tokens=20, eta_s=0.0)


def test_numbers_rise_and_name_all_ids() -> None:
    states = StateExchange()
    first = states.make({"a": [OFFER], "b": []})
    second = states.make({"b": []})
    assert (first.number, second.number) == (1, 2)
    assert first.ids == ["a", "b"]
    assert first.entries == [OFFER]


def test_an_older_or_equal_state_is_dropped() -> None:
    states = StateExchange()
    assert states.take(State(number=5, last_seen=0, ids=["a"], entries=[OFFER])) == ([OFFER], [])
    assert states.take(State(number=5, last_seen=0, ids=[], entries=[])) is None
    assert states.take(State(number=4, last_seen=0, ids=[], entries=[])) is None
    assert states.make({}).last_seen == 5


def test_absence_counts_only_once_the_peer_knew() -> None:
    states = StateExchange()
    states.make({})
    states.make({"a": [OFFER]})
    # Made before the peer saw our State number 2, the first with the id.
    assert states.take(State(number=1, last_seen=1, ids=[], entries=[])) == ([], [])
    assert states.take(State(number=2, last_seen=2, ids=["a"], entries=[])) == ([], [])
    assert states.take(State(number=3, last_seen=2, ids=[], entries=[])) == ([], ["a"])


def test_what_we_do_not_name_any_more_is_not_reported() -> None:
    states = StateExchange()
    states.make({"a": [OFFER]})
    states.make({})
    assert states.take(State(number=1, last_seen=2, ids=[], entries=[])) == ([], [])
