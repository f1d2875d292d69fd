"""The one table from errors to HTTP answers; handlers raise and never pick a status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pdserve_router.errors import (
    BadRequest,
    ModelNotFound,
    NodeFailed,
    NodeLost,
    NotReady,
    RequestTimeout,
    RouterDraining,
    RouterError,
)

if TYPE_CHECKING:
    from pdserve_protocol.outputs import ErrorCode

RETRY_AFTER_S = 1


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """Status and OpenAI error type; ``retry`` asks the client to come again a little later."""

    status: int
    type: str
    retry: bool = False


_BAD = HttpAnswer(status=400, type="invalid_request_error")
_UNAVAILABLE = HttpAnswer(status=503, type="service_unavailable_error", retry=True)
_TIMEOUT = HttpAnswer(status=504, type="timeout_error")
_INTERNAL = HttpAnswer(status=500, type="server_error")

_BY_ERROR: dict[type[RouterError], HttpAnswer] = {
    BadRequest: _BAD,
    ModelNotFound: HttpAnswer(status=404, type="invalid_request_error"),
    NotReady: _UNAVAILABLE,
    RouterDraining: _UNAVAILABLE,
    RequestTimeout: _TIMEOUT,
    NodeLost: _UNAVAILABLE,
}

_BY_NODE_CODE: dict[ErrorCode, HttpAnswer] = {
    "stale_boot": _UNAVAILABLE,
    "draining": _UNAVAILABLE,
    "overloaded": _UNAVAILABLE,
    "does_not_fit": _BAD,
    "bad_request": _BAD,
    "handoff": _UNAVAILABLE,
    "deadline": _TIMEOUT,
    "internal": _INTERNAL,
}

_BY_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def http_answer(error: RouterError) -> HttpAnswer:
    """Answer for an error of this package; one that is not in the table is a fault of ours, 500."""
    if isinstance(error, NodeFailed):
        return _BY_NODE_CODE[error.node_code]
    for cls in type(error).__mro__:
        if cls in _BY_ERROR:
            return _BY_ERROR[cls]
    return _INTERNAL


def error_body(error: RouterError) -> bytes:
    """The OpenAI error object of ``error`` as JSON."""
    return _body(str(error), http_answer(error).type, error.param, error.code)


def status_body(status: int, message: str) -> bytes:
    """The OpenAI error object of an HTTP status that the web server itself decided (no such path, too large, ...)."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _body(message, kind, None, _BY_STATUS.get(status))


def _body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
