"""The `router` command: wires the parts together, runs them until a signal, drains."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web
from pdserve_protocol.errors import PortTaken, ProtocolError
from pdserve_text.errors import TextError
from pdserve_text.files import load_tokenizer_files

from pdserve_router.app import build_app
from pdserve_router.args import parse_args
from pdserve_router.dispatcher import Dispatcher
from pdserve_router.errors import ArgumentError
from pdserve_router.metrics import RouterMetrics
from pdserve_router.node_metrics import NodeMetrics
from pdserve_router.parsers import ParserChoice
from pdserve_router.registry import NodeRegistry
from pdserve_router.serving import Serving
from pdserve_router.text_model import TextModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_router.args import RouterConfig

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
_OBJECTS_A_SEARCH = 20_000


class RouterServer:
    """All parts of one router. ``start``, then ``drain`` (if wanted), then ``close``, on one event loop.

    Raises:
        TextError: ``--tokenizer`` names no usable folder.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        text = TextModel(load_tokenizer_files(config.tokenizer)) if config.tokenizer else None
        metrics = RouterMetrics()
        self._registry = NodeRegistry(
            prefill=config.prefill, decode=config.decode, cluster_key=config.cluster_key, text=text
        )
        for role in ("prefill", "decode"):
            nodes = self._registry.of_role(role)
            metrics.watch_nodes(role, lambda nodes=nodes: sum(node.info is not None for node in nodes))  # type: ignore[misc]
        self._dispatcher = Dispatcher(
            metrics, disaggregated=bool(config.prefill), local_prefill=config.local_prefill == "auto"
        )
        self._serving = Serving(
            self._registry,
            self._dispatcher,
            metrics,
            timeout_s=config.request_timeout_s,
            parsers=ParserChoice(config.tool_call_parser, config.reasoning_parser),
        )
        node_metrics = NodeMetrics(lambda: self._registry.nodes)
        metrics.register(node_metrics)
        app = build_app(self._serving, self._registry, metrics, node_metrics)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            shutdown_timeout=_CLOSE_S,
            handle_signals=False,
        )

    async def start(self) -> str:
        """Listen and connect; returns the URL.

        Raises:
            PortTaken, OSError: the port cannot be bound.
        """
        config = self._config
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, config.host, config.port, backlog=1024).start()
        except OSError as error:
            await self._runner.cleanup()
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(config.host, config.port) from error
            raise
        await self._registry.start(self._dispatcher)
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def drain(self) -> None:
        """Take no new requests; wait for the running ones as long as configured."""
        if not await self._serving.drain(self._config.drain_timeout_s):
            log.warning("requests still ran after %g s and were ended", self._config.drain_timeout_s)

    def end_requests(self) -> None:
        """Do not wait any longer: running requests end with an error."""
        self._serving.end_all()

    async def close(self) -> None:
        """Stop listening, end what still runs, disconnect. Idempotent."""
        self._serving.end_all()
        await self._runner.cleanup()
        await self._registry.close()


async def run(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    server = RouterServer(config)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        url = await server.start()
        # What is loaded by now is no garbage, and requests leave few cycles: streams need not wait for a search.
        gc.freeze()
        gc.set_threshold(_OBJECTS_A_SEARCH)
        print(f"router ready-to-listen on {url}", flush=True)
        first = await signals.get()
        log.info("%s: draining; a second one ends at once", signal.Signals(first).name)
        draining = asyncio.create_task(server.drain())
        second = asyncio.create_task(signals.get())
        await asyncio.wait((draining, second), return_when=asyncio.FIRST_COMPLETED)
        if second.done():
            log.warning("ended without draining")
            draining.cancel()
            server.end_requests()
            return 128 + second.result()
        second.cancel()
        await draining
        return 0
    finally:
        await server.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    try:
        config = parse_args(sys.argv[1:] if argv is None else argv, os.environ)
        logging.basicConfig(
            level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        sys.exit(uvloop.run(run(config)))
    except (ArgumentError, ProtocolError, TextError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
