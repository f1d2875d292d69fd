"""A prefill and a decode node without a model, in one process: `python -m pdserve_bench.router.fake_nodes FOLDER ...`.

They speak the protocol as real nodes do: the prefill node says token 0 and that it has handed over, the decode node
repeats token 0 and goes on, and what one step made for all requests is one message. The first line on stdout has their
ports.
"""

from __future__ import annotations

import argparse
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from pdserve_protocol.codec import Decoder, encode
from pdserve_protocol.errors import BadMessage
from pdserve_protocol.node import (
    GetTokenizer,
    Hello,
    KVLayout,
    NodeIdentity,
    NodeInfo,
    NodeLoad,
    Ping,
    TokenizerFiles,
)
from pdserve_protocol.outputs import (
    Aborted,
    Finished,
    HandedOver,
    Outputs,
    PrefillProof,
    RequestOutput,
    TransferProof,
)
from pdserve_protocol.requests import AbortRequests, AddRequest
from pdserve_text.files import load_tokenizer_files, tokenizer_id
from pdserve_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pdserve_protocol.codec import Message
    from pdserve_protocol.node import Role

TEXT = """\
A router takes requests in, chooses who computes them, and hands back what they say, word by word. It should cost next
to nothing: the machine's cores are there for the model. Zürich, São Paulo and Kraków have 3 names; 1 + 1 = 2.
"""
MODEL_NAME = "none"
_MAX_MODEL_LEN = 8192
_LAYOUT = KVLayout(block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16", block_bytes=512)
_PREFILL = PrefillProof(queue_s=0.0, prefill_s=0.001, cached_tokens=0, computed_tokens=1)
_TRANSFER = TransferProof(
    transport="none",
    exact=True,
    blocks=1,
    bytes=512,
    cached_tokens=0,
    recomputed_tokens=0,
    grant_s=0.0,
    transfer_s=0.0,
    landing_s=0.0,
    admission_s=0.0,
)


class _Door:
    """What both nodes have: a socket, who they are, and the way to the one router."""

    def __init__(self, context: zmq.Context[Any], role: Role, files: dict[str, bytes]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._files = TokenizerFiles(tokenizer_id=tokenizer_id(files), files=files)
        self._decoder = Decoder(Hello | Ping | GetTokenizer | AddRequest | AbortRequests)
        self._router = b""
        self._boot_id = secrets.token_hex(16)
        self._role = role

    def receive(self) -> list[AddRequest | AbortRequests]:
        """All messages that are there; those about the node itself are answered here."""
        others: list[AddRequest | AbortRequests] = []
        while True:
            try:
                self._router, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return others
            try:
                message = self._decoder.decode(data)
            except BadMessage:
                # About hand-offs between real nodes; here there are none.
                continue
            match message:
                case Hello():
                    self.say(self._info())
                case Ping():
                    self.say(self._load())
                case GetTokenizer():
                    self.say(self._files)
                case _:
                    others.append(message)

    def say(self, message: Message) -> None:
        self.socket.send_multipart((self._router, encode(message)))

    def _info(self) -> NodeInfo:
        identity = NodeIdentity(
            boot_id=self._boot_id,
            role=self._role,
            model_id="none",
            tokenizer_id=self._files.tokenizer_id,
            numerics="none",
            layout=_LAYOUT,
            digest="none",
            connectors=["none"],
        )
        return NodeInfo(
            identity=identity,
            served_model_name=MODEL_NAME,
            port=self.port,
            advertise_host=None,
            max_model_len=_MAX_MODEL_LEN,
            kv_capacity_tokens=1 << 30,
            vocab_size=1 << 20,
            software="pdserve bench router",
        )

    def _load(self) -> NodeLoad:
        return NodeLoad(
            boot_id=self._boot_id,
            draining=False,
            running=0,
            waiting=0,
            handoffs=0,
            blocks_total=1,
            blocks_free=1,
            blocks_cached=0,
            blocks_held=0,
            blocks_in_use=0,
        )


class FakeNodes:
    """Args:
    step_s: between two tokens of a request; 0 is at once.
    """

    def __init__(self, files: dict[str, bytes], step_s: float) -> None:
        context: zmq.Context[Any] = zmq.Context()
        self.prefill, self.decode = _Door(context, "prefill", files), _Door(context, "decode", files)
        self._tokens = Tokenizer.from_files(files).encode(TEXT, add_special_tokens=False)
        self._step_s = step_s
        self._next_step = 0.0
        self._running: dict[str, tuple[int, int]] = {}

    def serve(self) -> None:
        """For ever."""
        poller = zmq.Poller()
        poller.register(self.prefill.socket, zmq.POLLIN)
        poller.register(self.decode.socket, zmq.POLLIN)
        while True:
            wait_s = self._next_step - time.monotonic()
            poller.poll(max(0, round(wait_s * 1000)) if self._running else None)
            self._prefill_requests(self.prefill.receive())
            self._decode_requests(self.decode.receive())
            if self._running and time.monotonic() >= self._next_step:
                self._next_step = time.monotonic() + self._step_s
                self._step()

    def _prefill_requests(self, messages: list[AddRequest | AbortRequests]) -> None:
        outputs = []
        for message in messages:
            if isinstance(message, AddRequest):
                outputs.append(RequestOutput(id=message.id, position=0, token_ids=self._tokens[:1], prefill=_PREFILL))
                outputs.append(RequestOutput(id=message.id, position=1, end=HandedOver()))
        if outputs:
            self.prefill.say(Outputs(outputs=outputs))

    def _decode_requests(self, messages: list[AddRequest | AbortRequests]) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                self._running[message.id] = (0, message.sampling.max_tokens)
            else:
                ended = [id for id in message.ids if self._running.pop(id, None) is not None]
                if ended:
                    self.decode.say(Outputs(outputs=[RequestOutput(id=id, position=0, end=Aborted()) for id in ended]))

    def _step(self) -> None:
        outputs = []
        for id, (position, length) in list(self._running.items()):
            count = 1 if position else 2
            ids = [self._tokens[(position + i) % len(self._tokens)] for i in range(count)]
            is_last = position + count >= length
            end = Finished(reason="length") if is_last else None
            proof = None if position else _TRANSFER
            outputs.append(RequestOutput(id=id, position=position, token_ids=ids, end=end, transfer=proof))
            if is_last:
                del self._running[id]
            else:
                self._running[id] = (position + count, length)
        self.decode.say(Outputs(outputs=outputs))


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("step_ms", type=float)
    args = parser.parse_args()
    nodes = FakeNodes(load_tokenizer_files(args.folder), args.step_ms / 1000)
    print(nodes.prefill.port, nodes.decode.port, flush=True)
    nodes.serve()


if __name__ == "__main__":
    main()
