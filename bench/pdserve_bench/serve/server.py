"""What a server says of its model."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
import msgspec

from pdserve_bench.errors import ServerNotUsable

_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """``max_model_len``, ``vocab_size``: None where the server does not say."""

    name: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def served_model(url: str, name: str | None) -> ServedModel:
    """The model of this name, or the first that the server has.

    Raises:
        ServerNotUsable: it does not answer as an OpenAI server does, or has no such model.
    """
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(f"{url}/v1/models") as response:
            models = msgspec.json.decode(await response.read(), type=_Models).data
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise ServerNotUsable(url, f"GET /v1/models: {type(error).__name__}: {error}") from error
    for model in models:
        if name in (None, model.id):
            return ServedModel(name=model.id, max_model_len=model.max_model_len, vocab_size=model.vocab_size)
    raise ServerNotUsable(url, f"it serves {', '.join(model.id for model in models) or 'nothing'}, not {name}")
