"""Sends requests: in an open loop at given times, in a closed loop as answers come."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from pdserve_bench.serve.client import Client
    from pdserve_bench.serve.records import RequestRecord


async def open_loop(
    client: Client, bodies: Sequence[bytes], times: Sequence[float], on_record: Callable[[RequestRecord], None]
) -> list[RequestRecord]:
    """Sends each request at its time, in seconds from now, however many are under way."""
    start = time.monotonic()

    async def one(body: bytes, due: float) -> RequestRecord:
        record = await client.request(body, due)
        on_record(record)
        return record

    tasks = []
    async with asyncio.TaskGroup() as group:
        for body, offset in zip(bodies, times, strict=True):
            due = start + offset
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(body, due)))
    return [task.result() for task in tasks]


async def closed_loop(
    client: Client, bodies: Sequence[bytes], concurrency: int, on_record: Callable[[RequestRecord], None]
) -> list[RequestRecord]:
    """Keeps ``concurrency`` requests under way until all are answered."""
    queue: Iterator[bytes] = iter(bodies)
    records: list[RequestRecord] = []

    async def user() -> None:
        for body in queue:
            record = await client.request(body)
            records.append(record)
            on_record(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(bodies))):
            group.create_task(user())
    return records


@asynccontextmanager
async def load_beside(client: Client, bodies: Iterator[bytes], concurrency: int) -> AsyncIterator[list[RequestRecord]]:
    """Keeps ``concurrency`` requests under way until the block ends; the records of those answered by then."""
    records: list[RequestRecord] = []

    async def user() -> None:
        for body in bodies:
            records.append(await client.request(body))

    users = [asyncio.create_task(user()) for _ in range(concurrency)]
    try:
        yield records
    finally:
        for task in users:
            task.cancel()
        await asyncio.gather(*users, return_exceptions=True)
