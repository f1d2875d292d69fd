"""Routes of the router, request ids, and error answers in one place."""

from __future__ import annotations

import logging
import secrets
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdserve_router import openapi
from pdserve_router.errors import ModelNotFound, NotReady, RouterError
from pdserve_router.http_errors import RETRY_AFTER_S, error_body, http_answer, status_body
from pdserve_router.openai_answers import Model, ModelList, Version
from pdserve_router.request_body import MAX_BODY_BYTES
from pdserve_router.serving import REQUEST_ID, Serving
from pdserve_router.tokens_api import TokensApi

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve_router.metrics import RouterMetrics
    from pdserve_router.node_metrics import NodeMetrics
    from pdserve_router.registry import Node, NodeRegistry

log = logging.getLogger(__name__)

_MAX_REQUEST_ID_CHARS = 256
_ID_HEADER = "X-Request-Id"
_STARTED = web.RequestKey("started", bool)


def build_app(
    serving: Serving, registry: NodeRegistry, metrics: RouterMetrics, node_metrics: NodeMetrics
) -> web.Application:
    """The web application.

    Run it with ``handler_cancellation=True``, so that a client that goes away ends its request, and with
    ``auto_decompress=False``, since it decompresses bodies itself.
    """
    app = web.Application(middlewares=[_answer_errors], client_max_size=MAX_BODY_BYTES)
    status = _Status(serving, registry, metrics, node_metrics)
    tokens = TokensApi(registry)
    app.add_routes(
        [
            web.post("/v1/chat/completions", serving.chat),
            web.post("/v1/completions", serving.completion),
            web.post("/v1/responses", serving.responses),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/v1/models", status.models),
            web.get("/v1/models/{model:.+}", status.model),
            web.get("/health", status.health),
            web.get("/ready", status.ready),
            web.get("/metrics", status.metrics),
            web.get("/version", status.version),
            web.get("/openapi.json", status.openapi),
        ]
    )
    app.on_response_prepare.append(_echo_request_id)
    return app


@web.middleware
async def _answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    request[REQUEST_ID] = _request_id(request)
    try:
        return await handler(request)
    except RouterError as error:
        answer = http_answer(error)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if answer.retry else None
        return _json_bytes(error_body(error), answer.status, headers)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        message = f"{request.method} {request.path[:200]}: {error.reason}"
        return _json_bytes(status_body(error.status, message), error.status, headers)
    except ConnectionResetError:
        # The client is gone; nobody reads this.
        return web.Response(status=499)
    except Exception:  # the outermost loop of a request: a fault of ours is one request's, and must be seen
        log.exception("request %s failed inside the router", request[REQUEST_ID])
        if request.get(_STARTED):
            # Too late for a status: the connection is cut, so that the client sees that something is missing.
            raise
        return _json_bytes(status_body(500, "The router failed; its log says why"), 500)


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    request[_STARTED] = True
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[_ID_HEADER] = request_id


def _request_id(request: web.Request) -> str:
    """The client's id where it gave a sensible one. It names log lines and answers, never anything on a node."""
    given = request.headers.get(_ID_HEADER, "")
    if given and len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req-{secrets.token_hex(12)}"


class _Status:
    """Everything that is not generation."""

    def __init__(
        self, serving: Serving, registry: NodeRegistry, metrics: RouterMetrics, node_metrics: NodeMetrics
    ) -> None:
        self._node_metrics = node_metrics
        self._serving = serving
        self._registry = registry
        self._metrics = metrics
        self._created = int(time.time())

    async def models(self, request: web.Request) -> web.Response:
        return _json(ModelList(data=[self._model(name) for name in self._registry.model_names()]))

    async def model(self, request: web.Request) -> web.Response:
        name, names = request.match_info["model"], self._registry.model_names()
        if name not in names:
            raise ModelNotFound(name, names)
        return _json(self._model(name))

    async def health(self, request: web.Request) -> web.Response:
        """200 for as long as the router lives; the body says whether it can serve."""
        prefill, decode = self._registry.of_role("prefill"), self._registry.of_role("decode")
        return _json(
            {
                "status": "draining" if self._serving.draining else "ok",
                "degraded": self._degraded(),
                "pair": self._registry.has_pair(),
                "can_serve": any(node.usable for node in decode),
                "prefill": [_node(node) for node in prefill],
                "decode": [_node(node) for node in decode],
            }
        )

    async def ready(self, request: web.Request) -> web.Response:
        """200 when a request would be served, if need be by a decode node alone, which the body tells."""
        names = self._registry.model_names()
        if self._serving.draining:
            raise NotReady("The router is stopping")
        served = [self._registry.resolve(name) for name in names]
        if not any(model.decode for model in served):
            raise NotReady("No decode node is up")
        return _json({"status": "ready", "degraded": self._degraded(), "models": names})

    async def metrics(self, request: web.Request) -> web.Response:
        await self._node_metrics.refresh()
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def version(self, request: web.Request) -> web.Response:
        return _json(Version(version=version("pdserve")))

    async def openapi(self, request: web.Request) -> web.Response:
        return _json_bytes(openapi.document(), 200)

    def _degraded(self) -> bool:
        """Prefill nodes are configured, and none works with a decode node."""
        return bool(self._registry.of_role("prefill")) and not self._registry.has_pair()

    def _model(self, name: str) -> Model:
        infos = [n.info for n in self._registry.nodes if n.usable and n.info and n.info.served_model_name == name]
        return Model(
            id=name,
            created=self._created,
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
        )


def _node(node: Node) -> dict[str, Any]:
    info, load = node.info, node.load
    return {
        "address": node.name,
        "up": info is not None,
        "usable": node.usable,
        "refused": node.refused,
        "draining": bool(load and load.draining),
        "boot_id": info.identity.boot_id if info else None,
        "model": info.served_model_name if info else None,
        "running": load.running if info and load else None,
        "waiting": load.waiting if info and load else None,
    }


def _json(value: Any) -> web.Response:
    return _json_bytes(msgspec.json.encode(value), 200)


def _json_bytes(body: bytes, status: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
