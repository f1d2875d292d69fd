"""The bytes of a request's body, decompressed here so that each fault of them is an answer in the API's own shape."""

from __future__ import annotations

import zlib

from aiohttp import web

from pdserve_router.errors import BadRequest

# A prompt of more than a million tokens; the body of one is read and parsed on the event loop, which others wait for.
MAX_BODY_BYTES = 8 << 20
# Either header, gzip's or zlib's, is recognized.
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


async def read_body(http: web.Request) -> bytes:
    """The whole body. The server must not have decompressed it.

    Raises:
        BadRequest: it is compressed, and damaged or in a way that is not known here.
        web.HTTPRequestEntityTooLarge: it is, or it becomes, longer than ``MAX_BODY_BYTES``.
    """
    data = await http.read()
    encoding = http.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        return data
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise BadRequest(f"Content-Encoding {encoding[:32]!r} is not supported; gzip and deflate are")
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        body = decompressor.decompress(data, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise BadRequest(f"The body is not {encoding}: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(body))
    if not decompressor.eof or decompressor.unused_data:
        raise BadRequest(f"The body is not one whole {encoding} stream")
    return body
