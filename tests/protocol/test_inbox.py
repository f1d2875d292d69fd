from __future__ import annotations

import queue
import threading
import time

import pytest
from pdserve_protocol.inbox import Inbox


def test_items_come_in_their_order() -> None:
    inbox: Inbox[int] = Inbox()
    for number in range(3):
        inbox.put(number)
    assert [inbox.get(), inbox.get(1.0), inbox.get_nowait()] == [0, 1, 2]
    with pytest.raises(queue.Empty):
        inbox.get_nowait()


@pytest.mark.parametrize("timeout_s", [0.0, 1e-9, 1e-6, 20e-6, 1e-3])
def test_a_wait_ends_however_short_it_is(timeout_s: float) -> None:
    inbox: Inbox[int] = Inbox()
    ended = threading.Event()

    def read() -> None:
        for number in range(200):
            inbox.put(number)
            assert inbox.get() == number
            with pytest.raises(queue.Empty):
                inbox.get(timeout_s)
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    assert ended.wait(30.0)


def test_whoever_waits_is_woken() -> None:
    inbox: Inbox[int] = Inbox()
    back: Inbox[int] = Inbox()
    rounds = 2_000

    def answer() -> None:
        for _ in range(rounds):
            back.put(inbox.get())

    threading.Thread(target=answer, daemon=True).start()
    for number in range(rounds):
        inbox.put(number)
        assert back.get(10.0) == number


def test_many_writers() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()

    def write(writer: int) -> None:
        for number in range(500):
            inbox.put((writer, number))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    found = [inbox.get(10.0) for _ in range(2_000)]
    for writer in range(4):
        assert [number for who, number in found if who == writer] == list(range(500))
    with pytest.raises(queue.Empty):
        inbox.get(1e-3)


def test_a_wait_takes_its_time() -> None:
    inbox: Inbox[int] = Inbox()
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        inbox.get(0.05)
    assert time.monotonic() - began >= 0.05
