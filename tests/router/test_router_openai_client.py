"""The official client of OpenAI works: sync, async, streaming, both endpoints, errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
import uvloop
from pdserve_protocol.outputs import Failed
from pdserve_text.tokenizer import Tokenizer
from support.router_cluster import FILES, pair, router_cluster
from support.tokenizers import EOS_ID

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ANSWER = "The answer is é 東京"
TOKENS = [*Tokenizer.from_files(FILES).encode(ANSWER, add_special_tokens=False), EOS_ID]
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


def served(scenario: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), router_cluster(pair(TOKENS)) as cluster:
            await scenario(cluster.url + "/v1")

    uvloop.run(main())


@pytest.mark.slow
def test_sync() -> None:
    def use(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["fake"]
            assert client.models.retrieve("fake").id == "fake"
            chat = client.chat.completions.create(
                model="fake", messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
            )
            assert chat.choices[0].message.content == ANSWER
            assert chat.choices[0].finish_reason == "stop"
            assert chat.choices[0].logprobs is not None
            assert chat.choices[0].logprobs.content is not None
            assert len(chat.choices[0].logprobs.content) == len(TOKENS) - 1
            assert chat.usage is not None
            assert chat.usage.completion_tokens == len(TOKENS)
            assert chat.model_extra is not None
            assert chat.model_extra["pdserve"]["mode"] == "disaggregated"
            options = {"include_usage": True}
            chunks = list(
                client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, stream_options=options)  # type: ignore[call-overload]
            )
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
            assert chunks[-1].usage.total_tokens == chat.usage.total_tokens
            text = client.completions.create(model="fake", prompt="hello", max_tokens=3, logprobs=2)
            assert ANSWER.startswith(text.choices[0].text)
            assert text.choices[0].logprobs is not None
            assert text.choices[0].logprobs.tokens is not None
            assert len(text.choices[0].logprobs.tokens) == 3
            parts = client.completions.create(model="fake", prompt=[70, 71], max_tokens=50, stream=True)
            assert "".join(part.choices[0].text for part in parts) == ANSWER

    async def scenario(url: str) -> None:
        await asyncio.to_thread(use, url)

    served(scenario)


@pytest.mark.slow
def test_async() -> None:
    async def scenario(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            chat = await client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=100)
            assert chat.choices[0].message.content == ANSWER
            async with client.chat.completions.stream(model="fake", messages=MESSAGES) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == ANSWER
            assert final.choices[0].finish_reason == "stop"
            parts = await client.completions.create(model="fake", prompt="hello", max_tokens=50, stream=True)
            assert "".join([part.choices[0].text async for part in parts]) == ANSWER

    served(scenario)


def test_errors_become_the_clients_own() -> None:
    async def scenario(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError) as not_found:
                await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
            assert not_found.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.chat.completions.create(model="fake", messages=MESSAGES, temperature=9)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.BadRequestError) as too_long:
                await client.completions.create(model="fake", prompt="hello", max_tokens=1000, stream=True)
            assert too_long.value.code == "context_length_exceeded"

    served(scenario)


def test_a_failure_in_mid_stream_is_seen() -> None:
    # B83
    async def main() -> None:
        async with asyncio.timeout(30), router_cluster(pair(manual=True)) as c:
            client = openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="any", max_retries=0)
            async with client:
                starting = asyncio.create_task(client.completions.create(model="fake", prompt="x", stream=True))
                half = await c.prefill[0].requests.get()
                c.prefill[0].say(half, 0, TOKENS[:1])
                stream = await starting
                assert (await anext(stream)).choices[0].text
                await c.decode[0].requests.get()
                c.decode[0].say(half, 1, end=Failed(code="internal", message="a fault"))
                with pytest.raises(openai.APIError, match="a fault"):
                    await anext(stream)

    uvloop.run(main())
