"""Work that grows with what a client sends is done aside: while the event loop is held, nodes hear no pings."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from pdserve_router import tokens_api
from pdserve_router.errors import ContextTooLong
from pdserve_router.openai_types import MAX_TOKENS
from pdserve_router.text_model import TextModel
from pdserve_router.validate import parse_chat
from pdserve_text.chat_template import ChatTemplate
from pdserve_text.tokenizer import Tokenizer
from support.router_cluster import FILES, pair, router_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = "word " * 2000
TEMPLATE = (
    b"{% if tools %}{{ tools | tojson }}{% endif %}{% if note %}{{ note | tojson(indent=4) }}{% endif %}"
    b"{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}"
    b"{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
)


@pytest.fixture
def on_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str], set[bool]]:
    """Watches a method: whether it was called in the thread of the event loop (and in another one)."""

    def watch(kind: type, name: str) -> set[bool]:
        seen: set[bool] = set()
        method = getattr(kind, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.add(threading.current_thread() is threading.main_thread())
            return method(*args, **kwargs)

        monkeypatch.setattr(kind, name, watched)
        return seen

    return watch


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "hi"}]} | fields).encode()).prompts[0]


def tool(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


def said(**fields: Any) -> Any:
    return chat(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"} | fields])


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize(
    "prompt",
    [
        LONG,
        said(content=LONG),
        said(content=[{"type": "text", "text": LONG}]),
        said(reasoning_content=LONG),
        said(tool_calls=[call({"a": LONG})]),
        chat(tools=tool(description=LONG)),
        chat(tools=tool(parameters={"properties": {LONG: {"type": "string"}}})),
        chat(chat_template_kwargs={"note": LONG}),
    ],
    ids=["text", "content", "parts", "reasoning", "arguments", "description", "parameters", "kwargs"],
)
def test_a_long_prompt_is_rendered_and_tokenized_aside(prompt: Any, on_loop: Any) -> None:
    # B108: wherever it is long.
    text = TextModel(FILES | {"chat_template.jinja": TEMPLATE})
    encoded, rendered = on_loop(Tokenizer, "encode"), on_loop(ChatTemplate, "render")
    assert len(asyncio.run(text.prompt_ids(prompt, 1 << 20))) > 1000
    assert encoded == {False}
    assert rendered == (set() if isinstance(prompt, str) else {False})
    with pytest.raises(ContextTooLong, match="at least"):
        asyncio.run(text.prompt_ids(prompt, 100))


def test_what_a_template_makes_long_is_tokenized_aside(on_loop: Any) -> None:
    text = TextModel(FILES | {"chat_template.jinja": TEMPLATE})
    note: list[Any] = [0] * 100
    for _ in range(100):
        note = [note]
    encoded = on_loop(Tokenizer, "encode")
    asyncio.run(text.prompt_ids(chat(), 1 << 20))
    assert encoded == {True}
    encoded.clear()
    asyncio.run(text.prompt_ids(chat(chat_template_kwargs={"note": note}), 1 << 20))
    assert encoded == {False}


def test_tokens_are_shown_and_read_aside(on_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, read = on_loop(Tokenizer, "token_bytes"), on_loop(Tokenizer, "decode")

    async def main() -> None:
        async with asyncio.timeout(30), router_cluster(pair()) as c:
            status, answer, _ = await c.post("/tokenize", {"prompt": "hello", "return_token_strs": True})
            assert (status, "".join(answer["token_strs"])) == (200, "hello")
            assert shown == {False}
            assert (await c.post("/detokenize", {"tokens": answer["tokens"]}))[1] == {"prompt": "hello"}
            assert read == {False}
            status, answer, _ = await c.post(
                "/detokenize", io.BytesIO(json.dumps({"tokens": [5] * (MAX_TOKENS + 1)}).encode())
            )
            assert (status, answer["error"]["param"]) == (400, "tokens")
            assert str(MAX_TOKENS) in answer["error"]["message"]
            monkeypatch.setattr(tokens_api, "MAX_TOKENS", 3)
            assert (await c.post("/tokenize", {"prompt": "%%%"}))[0] == 200
            status, answer, _ = await c.post("/tokenize", {"prompt": "%%%%"})
            assert (status, answer["error"]["param"]) == (400, "prompt")
            assert "at most 3" in answer["error"]["message"]

    asyncio.run(main())
