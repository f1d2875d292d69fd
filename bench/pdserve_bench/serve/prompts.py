"""Request bodies: random prompts of given lengths, or the prompts of a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve_bench.errors import BadPromptFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from pdserve_bench.serve.config import Endpoint
    from pdserve_bench.serve.lengths import Lengths

# Short words that common tokenizers keep whole, for chat prompts, which must be text: a word is about a token.
_WORDS = [
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company"),
    *(
        "system",
        "program",
        "question",
        "work",
        "government",
        "number",
        "night",
        "point",
        "home",
        "water",
        "room",
        "mother",
    ),
    *("area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word"),
    *("business", "issue", "side", "kind", "head", "house", "service", "friend"),
]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Text, token ids or chat messages. ``max_tokens``: None leaves it to the run."""

    content: str | list[int] | list[dict[str, Any]]
    max_tokens: int | None = None


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def random_prompts(
    endpoint: Endpoint, lengths: Lengths, vocab_size: int, limit: int | None, random: Random
) -> Iterator[Prompt]:
    """Without end. Token ids for completions, words for chat.

    Args:
        limit: tokens of a prompt at most; longer draws are cut.
    """
    while True:
        length = lengths.draw(random)
        length = min(length, limit) if limit is not None else length
        if endpoint == "chat":
            yield Prompt(content=" ".join(random.choices(_WORDS, k=length)))
        else:
            yield Prompt(content=[random.randrange(vocab_size) for _ in range(length)])


def file_prompts(path: Path) -> list[Prompt]:
    """A prompt a line: as it is, or in a .jsonl file {"prompt": ..., "max_tokens": ...} or {"messages": [...]}.

    Raises:
        BadPromptFile: it cannot be read, a line is something else, or there is none.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadPromptFile(str(path), str(error)) from error
    if not lines:
        raise BadPromptFile(str(path), "it holds none")
    if path.suffix != ".jsonl":
        return [Prompt(content=line) for line in lines]
    return [_from_json(path, number, line) for number, line in enumerate(lines, 1)]


def _from_json(path: Path, number: int, text: str) -> Prompt:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError as error:
        raise BadPromptFile(str(path), f"line {number}: {error}") from error
    content = line.prompt if line.messages is None else line.messages
    if not content:
        raise BadPromptFile(str(path), f"line {number} has neither 'prompt' nor 'messages'")
    return Prompt(content=content, max_tokens=line.max_tokens)


def request_body(
    prompt: Prompt, endpoint: Endpoint, model: str, max_tokens: int, temperature: float, extra: dict[str, Any]
) -> bytes:
    """JSON of a streaming request for exactly ``max_tokens`` tokens, unless ``extra``, more fields, says otherwise."""
    content = prompt.content
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.max_tokens or max_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint == "chat":
        body["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    else:
        body["prompt"] = content
    return msgspec.json.encode(body | extra)
