"""One terminal output for each open request, whatever is put in."""

from __future__ import annotations

from hypothesis import given, strategies as st
from pdserve_engine.door import Visitor
from pdserve_engine.outbox import OpenRequest, Outbox
from pdserve_protocol.outputs import Aborted, Failed, Finished, HandedOver, RequestOutput

ONE, OTHER = Visitor(b"1"), Visitor(b"2")
ENDS = [None, None, Finished(reason="stop"), HandedOver(), Aborted(), Failed(code="internal", message="m")]


def output(request_id: str, end: object = None) -> RequestOutput:
    return RequestOutput(id=request_id, position=0, token_ids=[] if end else [1], end=end)  # type: ignore[arg-type]


def opened(owner: Visitor = ONE, deadline: float = 10.0) -> OpenRequest:
    return OpenRequest(owner, deadline, 10.0, 7)


def test_outputs_of_a_turn_leave_together_in_order() -> None:
    outbox = Outbox()
    outbox.open("a", opened())
    outbox.open("b", opened(OTHER))
    outbox.open("c", opened())
    for request_id in ("a", "b", "c", "a"):
        outbox.put(output(request_id))
    taken = outbox.take()
    assert {owner: [one.id for one in outputs] for owner, outputs in taken.items()} == {
        ONE: ["a", "c", "a"],
        OTHER: ["b"],
    }
    assert not outbox.take()


def test_the_end_closes() -> None:
    outbox = Outbox()
    outbox.open("a", opened())
    assert outbox.num_prompt_tokens == 7
    outbox.put(output("a", Aborted()))
    outbox.put(output("a", Aborted()))
    outbox.put(output("never", Aborted()))
    assert (len(outbox), outbox.num_prompt_tokens, outbox.get("a")) == (0, 0, None)
    assert outbox.take() == {ONE: [output("a", Aborted())]}


def test_a_refusal_needs_no_open_request_and_leaves_one_of_that_name_alone() -> None:
    outbox = Outbox()
    outbox.open("a", opened())
    outbox.refuse(OTHER, output("a", Failed(code="bad_request", message="a request with id a is running")))
    assert [*outbox.take()] == [OTHER]
    assert outbox.ids() == ["a"]


def test_who_is_late_and_whose_they_are() -> None:
    outbox = Outbox()
    outbox.open("a", opened(deadline=1.0))
    outbox.open("b", opened(OTHER, deadline=2.0))
    assert outbox.overdue(1.0) == []
    assert [request_id for request_id, _ in outbox.overdue(1.5)] == ["a"]
    assert outbox.ids_of(OTHER) == ["b"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(ENDS), st.booleans())))
def test_exactly_one_end_and_nothing_after_it(history: list) -> None:
    outbox, said = Outbox(), {request_id: [] for request_id in "abc"}
    for request_id in said:
        outbox.open(request_id, opened())
    for request_id, end, take in history:
        outbox.put(output(request_id, end))
        for outputs in outbox.take().values() if take else []:
            for one in outputs:
                said[one.id].append(one.end)
    for outputs in outbox.take().values():
        for one in outputs:
            said[one.id].append(one.end)
    for request_id, ends in said.items():
        assert all(end is None for end in ends[:-1])
        is_open = outbox.get(request_id) is not None
        assert is_open == (not ends or ends[-1] is None)
    assert outbox.num_prompt_tokens == 7 * len(outbox)
