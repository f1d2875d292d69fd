"""Requests that are asked twice, plain and streamed, and what differs between the two answers."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from support.cluster import Cluster

_OPENINGS = [
    *("Write a short story about", "Explain", "List three facts about", "What is the history of", "Describe"),
    *("In one sentence, what is", "Why do people like", "Tell a joke about", "Compare with the moon:", "Translate:"),
    *("Once upon a time there was", "def", "The price of", "On Monday I saw", "Une courte histoire de"),
]
_TOPICS = [
    *("the sea", "bread", "a red fox", "prime numbers", "the city of Rome", "music", "winter", "a broken clock"),
    *("chess", "東京", "coffee ☕", "the number 42", "gravity", "my neighbour", "an old map", "rain", "glass"),
    *("two brothers", "the letter e", "a long road"),
]
_STOPS = [["."], [" the", "\n\n"], ["e "], ["a", "zzz"], ["s t", "n a"]]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 12}, "language": {"enum": ["en", "fr", "日本語"]}},
            "required": ["word", "language"],
            "additionalProperties": False,
        },
    },
}
_CALL = {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": _TOOL["function"]["parameters"]}}  # type: ignore[index]
_OBJECT = {"response_format": _SCHEMA, "max_tokens": 120}


class Ask(NamedTuple):
    """A request, and what is special about it."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Tally:
    """``ends``: how many ended how, by kind."""

    total: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)


class _Answer(NamedTuple):
    text: str
    reasoning: str
    calls: list[tuple[str, str]]
    logprobs: list[Any]
    reason: str | None
    usage: Any


def asks(number: int, *, calls: bool = True) -> Iterator[Ask]:
    """Texts, stop strings, log probabilities and calls at temperature 0, of both endpoints in turn.

    Without ``calls`` there are objects instead, for a model that cannot be told of tools.
    """
    last = ("call", True, _CALL) if calls else ("object", True, _OBJECT)
    topics = [f"{opening} {topic}" for topic, opening in itertools.product(_TOPICS, _OPENINGS)]
    for i, prompt in enumerate(itertools.islice(itertools.cycle(topics), number)):
        stop = {"stop": _STOPS[i // 7 % len(_STOPS)]}
        kind, is_chat, extra = [
            ("text", False, {}),
            ("text", True, {}),
            ("stop", False, stop),
            ("stop", True, stop),
            ("logprobs", False, {"logprobs": 3}),
            ("logprobs and stop", True, stop | {"logprobs": True, "top_logprobs": 2}),
            last,
        ][i % 7]
        body = {"temperature": 0, "max_tokens": 32, **extra}
        if is_chat:
            yield Ask(kind, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]})
        else:
            yield Ask(kind, "/v1/completions", body | {"prompt": prompt})


def compare(
    cluster: Cluster, asked: Iterable[Ask], *, concurrency: int, on_end: Callable[[], None] = lambda: None
) -> Tally:
    """Asks everything twice, many at a time."""
    tally = Tally()

    def both(ask: Ask) -> tuple[Ask, _Answer, _Answer]:
        status, answer = cluster.post(ask.path, ask.body)
        assert status == 200, answer
        options = {"stream_options": {"include_usage": True}}
        return ask, _plain(answer), _streamed(cluster.stream(ask.path, ask.body | options))

    with ThreadPoolExecutor(concurrency) as threads:
        for ask, plain, streamed in threads.map(both, asked):
            tally.total += 1
            tally.ends[f"{ask.kind}: {plain.reason}"] += 1
            if plain != streamed:
                tally.different.append(f"{ask}\n  plain    {plain}\n  streamed {streamed}")
            on_end()
    return tally


def _plain(answer: dict[str, Any]) -> _Answer:
    (choice,) = answer["choices"]
    message = choice.get("message") or {"content": choice["text"]}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    return _Answer(
        message["content"] or "",
        message.get("reasoning_content") or "",
        calls,
        _entries(choice),
        choice["finish_reason"],
        _counts(answer["usage"]),
    )


def _streamed(events: Iterable[dict[str, Any]]) -> _Answer:
    text, reasoning, reason, usage = "", "", None, None
    calls: dict[int, list[str]] = {}
    entries: list[Any] = []
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                parts = calls.setdefault(call["index"], ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
            entries += _entries(choice)
            reason = choice["finish_reason"] or reason
    return _Answer(
        text, reasoning, [(name, arguments) for name, arguments in calls.values()], entries, reason, _counts(usage)
    )


def _counts(usage: dict[str, Any] | None) -> Any:
    """What was found in a cache the second time is no difference."""
    return usage and {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def _entries(choice: dict[str, Any]) -> list[Any]:
    """Log probabilities token by token, of either endpoint."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
    return list(zip(*columns, strict=True))
