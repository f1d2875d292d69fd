"""In which order waiting requests get their place in a step."""

from __future__ import annotations

from pdserve_engine.request import Request, RequestEvent, RequestStatus
from pdserve_engine.waiting_queue import WaitingQueue
from pdserve_protocol.sampling import SamplingParams


def queue_of(*requests: Request) -> WaitingQueue:
    queue = WaitingQueue()
    for request in requests:
        queue.add(request)
    return queue


def new(id: str, priority: int = 0, **fields: object) -> Request:
    return Request(request_id=id, prompt_token_ids=[1], sampling=SamplingParams(), priority=priority, **fields)  # type: ignore[arg-type]


def arrived(id: str) -> Request:
    request = new(id)
    request.stamp(RequestEvent.KV_ARRIVED, 0.0)
    return request


def preempted(id: str) -> Request:
    request = arrived(id)
    request.status = RequestStatus.PREEMPTED
    return request


def to_start(queue: WaitingQueue) -> list[str]:
    return [request.request_id for request in queue.to_start()]


def test_by_priority_and_then_as_they_came() -> None:
    assert to_start(queue_of(new("a", 1), new("b"), new("c", 1), new("d"), new("e", -1))) == ["e", "b", "d", "a", "c"]


def test_preempted_ones_the_latest_first_then_granted_ones_then_others() -> None:
    queue = queue_of(new("urgent", -9), new("g", granted=True), preempted("p"), new("h", granted=True), preempted("q"))
    assert to_start(queue) == ["q", "p", "g", "h", "urgent"]
    assert queue.has_preempted
    assert not queue_of(new("a")).has_preempted


def test_whose_kv_has_arrived_needs_no_blocks() -> None:
    first, second = arrived("first"), arrived("second")
    queue = queue_of(preempted("p"), first, new("a"), second)
    assert to_start(queue) == ["p", "a"]
    assert (len(queue), queue.num_arrived, queue.first_arrived()) == (4, 2, first)
    assert queue.discard(first)
    assert queue.first_arrived() is second
    assert queue.discard(second)
    assert (len(queue), queue.num_arrived, queue.first_arrived()) == (2, 0, None)


def test_who_has_left_is_not_there() -> None:
    a, b = new("a"), new("b")
    queue = queue_of(a, b)
    assert queue.discard(a)
    assert not queue.discard(a)
    assert to_start(queue) == ["b"]
    assert queue.discard(b)
    assert not queue
    assert not queue.has_preempted
