"""Compressed bodies: whole ones are read, all others are answered 400 in the API's own shape."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import TYPE_CHECKING

from pdserve_router.request_body import MAX_BODY_BYTES
from support.router_cluster import pair, router_cluster

if TYPE_CHECKING:
    import pytest

BODY = b'{"prompt":"hi"}'
BAD = [
    ("gzip", BODY),
    ("deflate", BODY),
    ("gzip", b""),
    ("gzip", gzip.compress(BODY)[:-3]),
    ("gzip", gzip.compress(BODY) + b"more"),
    ("br", BODY),
    ("zstd", BODY),
    ("gzip, gzip", gzip.compress(BODY)),
    ("no such thing", BODY),
]


def test_compressed_bodies(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), router_cluster(pair([70])) as c:
            for path in ("/v1/completions", "/tokenize"):
                for encoding, data in (("gzip", gzip.compress(BODY)), ("deflate", zlib.compress(BODY))):
                    assert (await c.post(path, data, **{"Content-Encoding": encoding}))[0] == 200
                assert (await c.post(path, BODY, **{"Content-Encoding": "identity"}))[0] == 200
                for encoding, data in BAD:
                    status, answer, headers = await c.post(path, data, **{"Content-Encoding": encoding})
                    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), (encoding, data)
                    assert headers["X-Request-Id"]
                bomb = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
                status, answer, _ = await c.post(path, bomb, **{"Content-Encoding": "gzip"})
                assert (status, answer["error"]["code"]) == (413, "request_too_large")

    asyncio.run(main())
    assert "failed inside" not in caplog.text
