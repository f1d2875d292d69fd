"""Stand-ins for the node and router processes: they speak as the real ones do, and compute nothing.

Run as ``fake_processes.py prefill|decode|broken`` or ``fake_processes.py router SCENARIO``. They ignore all other
flags: the command under test passes the real ones. Standard library only, so that they start in a moment.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROOF = {
    "mode": "disaggregated",
    "prefill_node": "127.0.0.1:7001",
    "decode_node": "127.0.0.1:7002",
    "transport": "fake",
    "blocks_moved": 3,
    "bytes_moved": 12288,
    "tokens_recomputed": 0,
    "cached_tokens": {"prefill": 0, "decode": 0},
    "exact": True,
    "time": {"queue_ms": 1.0, "prefill_ms": 2.0, "grant_ms": 3.0, "transfer_ms": 4.0, "landing_ms": 5.0},
    "a_field_of_later": 1,
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "good": {},
    "wrong answer": {"words": ["The capital", " of Japan is Kyoto."]},
    "nothing moved": {"proof": {"bytes_moved": 0, "blocks_moved": 0}},
    "recomputed": {"proof": {"tokens_recomputed": 16}},
    "aggregated": {"proof": {"mode": "aggregated", "prefill_node": None}},
    "error": {"status": 503},
    "broken stream": {"break": True},
    "dies": {"dies": True},
    "prefill node comes later": {"degraded": 3},
}


def chunks(path: str, scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """The stream of one answer."""
    chat = path.endswith("/chat/completions")
    words = scenario.get("words", ["The capital", " of Japan is", " Tokyo."])

    def choice(text: str) -> dict[str, Any]:
        return {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}

    said = [{"choices": [choice(word)]} for word in (words if chat else ["so", " it", " goes"])]
    last = {"choices": [choice("")], "pdserve": PROOF | scenario.get("proof", {})}
    usage = {"choices": [], "usage": {"prompt_tokens": 40, "completion_tokens": 3 if chat else 64}}
    opening = [{"choices": [choice("")]}]
    if scenario.get("break"):
        return [*opening, said[0], {"error": {"message": "the decode node is gone"}}]
    return [*opening, *said, last, usage]


def _stop(*_: object) -> None:
    print("stopping", file=sys.stderr, flush=True)
    sys.exit(0)


def _node(role: str) -> None:
    if role == "broken":
        sys.exit("no such model")
    print(f"{role} is warming up", file=sys.stderr, flush=True)
    print(f"{role}-node ready on 127.0.0.1:7123 (model fake, 64 KV blocks)", flush=True)
    signal.pause()


def _router(scenario: dict[str, Any]) -> None:
    degraded = iter([True] * scenario.get("degraded", 0))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            return

        def do_GET(self) -> None:
            self._answer(200, json.dumps({"data": [{"id": "fake"}], "degraded": next(degraded, False)}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if next(degraded, False):
                self._answer(503, b'{"error": {"message": "no prefill node yet"}}')
                return
            if "status" in scenario:
                self._answer(scenario["status"], b'{"error": {"message": "no room"}}')
                return
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks(self.path, scenario)]
            self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(f"router listens on http://127.0.0.1:{server.server_port}", flush=True)
    if scenario.get("dies"):
        sys.exit(3)
    server.serve_forever()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    if sys.argv[1] == "router":
        _router(SCENARIOS[sys.argv[2]])
    else:
        _node(sys.argv[1])
