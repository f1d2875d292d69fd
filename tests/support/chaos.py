"""Requests by the thousand over nodes that fail: each must end, with the right tokens or with a clear error.

The right tokens are known beforehand: from the oracle, or from the same requests over nodes that do not fail.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from pdserve_engine.oracle import expected_tokens
from pdserve_text.files import load_tokenizer_files
from pdserve_text.tokenizer import Tokenizer

from support.clients import prompt_of
from support.cluster import Cluster, Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ORACLE_NODE = Path(__file__).with_name("oracle_node.py")
REQUEST_S = 60.0
CLEAN_STATUS = {429, 500, 502, 503, 504}
WRONG = ("WrongKV", "ContractBroken", "Traceback")


class OracleCluster(Cluster):
    """A cluster whose nodes are oracles: see oracle_node.py."""

    def start_prefill(self, port: int) -> Process:
        args = ["--model", self.model, "--port", str(port), *self.node_args, *self.prefill_args]
        return Process("prefill", ["-P", str(ORACLE_NODE), "prefill", *args], self.folder, self.env)

    def start_decode(self, port: int) -> Process:
        args = ["--model", self.model, "--port", str(port), *self.node_args, *self.decode_args]
        return Process("decode", ["-P", str(ORACLE_NODE), "decode", *args], self.folder, self.env)


@dataclass(frozen=True)
class Ask:
    """One request. ``leaves_after_s``: the client goes away then, if it has no answer yet."""

    body: dict[str, Any]
    stream: bool
    leaves_after_s: float | None
    expected: str


def oracle_asks(folder: Path, count: int | None, seed: int, *, abort_share: float = 0.05) -> Iterator[Ask]:
    """Prompts of 1 to 400 tokens, some of which begin alike, and answers of 1 to 40 tokens. Endless without a count."""
    tokenizer = Tokenizer.from_files(load_tokenizer_files(folder))
    rng = random.Random(seed)
    ids, (letter,) = range(3, tokenizer.vocab_size), tokenizer.encode("a", add_special_tokens=False)
    prefixes = [rng.choices(ids, k=rng.choice([16, 33, 100, 250])) for _ in range(8)]
    for _ in itertools.count() if count is None else range(count):
        prompt = rng.choice([[], *prefixes]) + rng.choices(ids, k=rng.choice([0, 1, 14, 15, 16, 40, 90, 150]))
        # A whole character, so that the text of the answer is that of its tokens alone.
        prompt.append(letter)
        max_tokens = rng.choice([1, 2, 3, 8, 16, 40])
        token_ids = expected_tokens(prompt, max_tokens, tokenizer.vocab_size)
        end = next((i for i, token_id in enumerate(token_ids) if token_id in tokenizer.end_token_ids), max_tokens)
        yield Ask(
            body={"prompt": prompt, "max_tokens": max_tokens, "temperature": 0},
            stream=rng.random() < 0.5,
            leaves_after_s=rng.expovariate(10) if rng.random() < abort_share else None,
            expected=tokenizer.decode(token_ids[:end]),
        )


def recorded_asks(
    cluster: Cluster, count: int | None, seed: int, *, abort_share: float = 0.05, num_kinds: int = 60
) -> Iterator[Ask]:
    """Greedy and seeded requests whose right answers are those that ``cluster`` gives now, one at a time."""
    rng = random.Random(seed)
    common = prompt_of(0, 150)
    bodies = []
    for number in range(num_kinds):
        prompt = prompt_of(number + 1, rng.choice([1, 15, 16, 17, 40, 100, 250]))
        body = {"prompt": common + prompt if number % 3 == 0 else prompt, "max_tokens": rng.choice([1, 2, 8, 16, 32])}
        seeded = {"temperature": 0.9, "top_p": 0.95, "seed": number}
        bodies.append(body | (seeded if number % 2 else {"temperature": 0}))
    right = [cluster.complete(**body)["choices"][0]["text"] for body in bodies]

    def asks() -> Iterator[Ask]:
        for _ in itertools.count() if count is None else range(count):
            number = rng.randrange(num_kinds)
            leaves_after_s = rng.expovariate(3) if rng.random() < abort_share else None
            yield Ask(bodies[number], rng.random() < 0.5, leaves_after_s, right[number])

    return asks()


@dataclass
class Tally:
    """How the requests ended."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.ends.total()


async def send_all(
    url: str, asks: Iterable[Ask], tally: Tally, *, concurrency: int, on_end: Callable[[], None] = lambda: None
) -> None:
    """All of them, so many at a time. Each is given REQUEST_S to end."""
    waiting = iter(asks)
    connector = aiohttp.TCPConnector(limit=0)

    async def worker(session: aiohttp.ClientSession) -> None:
        for ask in waiting:
            end, wrong = await _send(session, ask)
            tally.ends[end] += 1
            if wrong is not None:
                tally.wrong.append(wrong)
            on_end()
            if end == "unavailable":
                await asyncio.sleep(0.05)

    async with aiohttp.ClientSession(url, connector=connector) as session, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker(session))


async def _send(session: aiohttp.ClientSession, ask: Ask) -> tuple[str, str | None]:
    """How it ended, and what was wrong with that."""
    limit = REQUEST_S if ask.leaves_after_s is None else ask.leaves_after_s
    try:
        async with (
            asyncio.timeout(limit),
            session.post("/v1/completions", json={**ask.body, "stream": ask.stream}) as answer,
        ):
            text = await answer.text()
    except TimeoutError:
        return ("left", None) if ask.leaves_after_s is not None else ("hung", f"no end within {REQUEST_S:g} s")
    except aiohttp.ClientError as error:
        return "cut", f"the connection was cut: {error!r}"
    if answer.status != 200:
        error = json.loads(text).get("error", {})
        is_clean = answer.status in CLEAN_STATUS and bool(error.get("message"))
        end = "unavailable" if answer.status == 503 else "error"
        return end, None if is_clean and "WrongKV" not in text else f"status {answer.status}: {text[:500]}"
    return _judge_stream(text, ask.expected) if ask.stream else _judge(json.loads(text), ask.expected)


def _judge(answer: dict[str, Any], expected: str) -> tuple[str, str | None]:
    text = answer["choices"][0]["text"]
    return "answered", None if text == expected else f"{text!r} instead of {expected!r}"


def _judge_stream(body: str, expected: str) -> tuple[str, str | None]:
    """A stream that fails says so in an event, and what came before is right."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    text = ""
    for line in lines:
        if line == "[DONE]":
            return "answered", None if text == expected else f"{text!r} instead of {expected!r}"
        event = json.loads(line)
        if "error" in event:
            is_clean = bool(event["error"].get("message")) and "WrongKV" not in line and expected.startswith(text)
            return "error event", None if is_clean else f"{line[:500]} after {text!r}"
        text += "".join(choice["text"] for choice in event["choices"])
    return "cut", "the stream ended without an end"


async def kill_now_and_then(cluster: Cluster, every_s: float, seed: int) -> None:
    """Kills a node at random and starts another at its address, for ever. Cancel it between two kills or in one."""
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(every_s * rng.uniform(0.5, 1.5))
        victim = rng.choice([*cluster.prefill, *cluster.decode])
        victim.kill()
        await asyncio.to_thread(cluster.restart, victim)


def faults_in_logs(cluster: Cluster) -> list[str]:
    """Lines of any node or router, past ones too, that tell of a wrong KV entry or a bug."""
    return [
        f"{log.name}: {line}"
        for log in sorted(cluster.folder.glob("*.log"))
        for line in log.read_text(errors="replace").splitlines()
        if any(word in line for word in WRONG)
    ]
