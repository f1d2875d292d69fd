"""A node without a model: a real ZMQ door that speaks the protocol and says the tokens it is told to.

By default it answers each request at once with ``tokens``; with ``manual=True`` it only queues what arrives, and the
test says what the node says.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio
from pdserve_protocol.codec import PROTOCOL_VERSION, Decoder, Message, encode
from pdserve_protocol.handoff import Meet
from pdserve_protocol.node import (
    GetStatus,
    GetTokenizer,
    Hello,
    KVLayout,
    NodeIdentity,
    NodeInfo,
    NodeLoad,
    NodeStatus,
    Ping,
    Role,
    TokenizerFiles,
)
from pdserve_protocol.outputs import (
    Aborted,
    End,
    Finished,
    HandedOver,
    Outputs,
    PrefillProof,
    PromptLogprobs,
    RequestOutput,
    TokenLogprobs,
    TransferProof,
)
from pdserve_protocol.requests import AbortRequests, AddRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RouterSays = Hello | Ping | GetStatus | GetTokenizer | AddRequest | AbortRequests | Meet
LAYOUT = KVLayout(block_size=16, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_bytes=4096)
PREFILL_PROOF = PrefillProof(queue_s=0.001, prefill_s=0.02, cached_tokens=2, computed_tokens=3)
TRANSFER_PROOF = TransferProof(
    transport="fake",
    exact=True,
    blocks=3,
    bytes=12288,
    cached_tokens=1,
    recomputed_tokens=0,
    grant_s=0.001,
    transfer_s=0.002,
    landing_s=0.003,
    admission_s=0.004,
)
_boots = itertools.count(1)


class FakeNode:
    """Attributes:
    requests: every AddRequest, in order, also those already answered.
    aborted: ids of every AbortRequests.
    gives_tokenizer: id of the tokenizer that it hands over.
    tokenizers_given: its id, each time.
    status: fields of its NodeStatus.
    tokens: what the node generates; an end id among them ends the output there unless the request ignores it.
    """

    def __init__(
        self,
        role: Role,
        files: dict[str, bytes],
        *,
        tokens: Sequence[int] = (),
        manual: bool = False,
        end_ids: frozenset[int] = frozenset({2}),
        model: str = "fake",
        max_model_len: int = 256,
        kv_capacity_tokens: int = 4096,
        vocab_size: int = 384,
        model_id: str = "model-1",
        tokenizer_id: str = "tokenizer-1",
        version: int = PROTOCOL_VERSION,
        layout: KVLayout = LAYOUT,
        port: int = 0,
    ) -> None:
        self.role: Role = role
        self.tokens = list(tokens)
        self.manual = manual
        self.draining = False
        self.mute = False
        self.status: dict[str, Any] = {"counters": {}, "peers": {}}
        self.gives_tokenizer = tokenizer_id
        self.tokenizers_given: asyncio.Queue[str] = asyncio.Queue()
        self.met: asyncio.Queue[Meet] = asyncio.Queue()
        self.requests: asyncio.Queue[AddRequest] = asyncio.Queue()
        self.aborted: asyncio.Queue[str] = asyncio.Queue()
        self.on_request: Callable[[AddRequest], None] = self.answer
        self.boot_id = f"boot-{next(_boots)}"
        self._files = files
        self._end_ids = end_ids
        self._routers: dict[str, bytes] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._bind(port)
        self._info = NodeInfo(
            identity=NodeIdentity(
                boot_id=self.boot_id,
                role=role,
                model_id=model_id,
                tokenizer_id=tokenizer_id,
                numerics="fake",
                layout=layout,
                digest="fake",
                connectors=["fake"],
                version=version,
            ),
            served_model_name=model,
            port=self.port,
            advertise_host=None,
            max_model_len=max_model_len,
            kv_capacity_tokens=kv_capacity_tokens,
            vocab_size=vocab_size,
            software="fake",
        )
        self._decoder = Decoder(RouterSays)
        self._task = asyncio.create_task(self._serve())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def close(self) -> None:
        """The process dies: no word to anyone. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    def say(
        self,
        request: AddRequest,
        position: int,
        token_ids: Sequence[int] = (),
        *,
        end: End | None = None,
        prefill: PrefillProof | None = None,
        transfer: TransferProof | None = None,
    ) -> None:
        """One output of ``request``; log probabilities are made up where they were asked for."""
        self.say_all(
            [self.output(request, position, token_ids, end=end, prefill=prefill, transfer=transfer)], request.id
        )

    def output(
        self,
        request: AddRequest,
        position: int,
        token_ids: Sequence[int] = (),
        *,
        end: End | None = None,
        prefill: PrefillProof | None = None,
        transfer: TransferProof | None = None,
    ) -> RequestOutput:
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = [made_up_logprobs(token_id, request.sampling.logprobs) for token_id in token_ids]
        of_prompt = None
        if prefill is not None and request.sampling.prompt_logprobs is not None and len(request.prompt_token_ids) > 1:
            of_prompt = self.prompt_logprobs(request)
        return RequestOutput(
            id=request.id,
            position=position,
            token_ids=list(token_ids),
            logprobs=logprobs,
            end=end,
            prefill=prefill,
            transfer=transfer,
            prompt_logprobs=of_prompt,
        )

    def prompt_logprobs(self, request: AddRequest, start: int = 1, stop: int | None = None) -> PromptLogprobs:
        """Made up, for the prompt's tokens from ``start`` on."""
        num_top = request.sampling.prompt_logprobs or 0
        ids = request.prompt_token_ids[start:stop]
        return PromptLogprobs(position=start, tokens=[made_up_logprobs(token_id, num_top) for token_id in ids])

    def say_all(self, outputs: list[RequestOutput], some_id: str) -> None:
        """Many outputs in one message, to the router that sent the request ``some_id``."""
        self._send(self._routers[some_id], Outputs(outputs=outputs))

    def answer(self, request: AddRequest) -> None:
        """What a node of this role would say, all at once but one output per token."""
        tokens, end = self._output_of(request)
        if request.send_to is not None:
            done = end if len(tokens) == 1 else None
            self.say(request, 0, tokens[:1], prefill=PREFILL_PROOF, end=done)
            if done is None:
                self.say(request, 1, end=HandedOver())
            return
        if request.receive_from is not None and len(tokens) == 1:
            self.say(request, 0, end=Aborted())
            return
        for i, token_id in enumerate(tokens):
            self.say(
                request,
                i,
                [token_id],
                end=end if i == len(tokens) - 1 else None,
                prefill=PREFILL_PROOF if i == 0 and request.receive_from is None else None,
                transfer=TRANSFER_PROOF if i == 0 and request.receive_from is not None else None,
            )

    def _output_of(self, request: AddRequest) -> tuple[list[int], Finished]:
        sampling = request.sampling
        tokens = []
        for token_id in itertools.islice(itertools.cycle(self.tokens), sampling.max_tokens):
            tokens.append(token_id)
            is_end = (token_id in self._end_ids and not sampling.ignore_eos) or token_id in sampling.stop_token_ids
            if is_end and len(tokens) > sampling.min_tokens:
                return tokens, Finished(reason="stop", stop_token_id=token_id)
        return tokens, Finished(reason="length")

    def _bind(self, port: int) -> int:
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        return int(self._socket.last_endpoint.rpartition(b":")[2])

    async def _serve(self) -> None:
        while True:
            router, data = await self._socket.recv_multipart()
            if self.mute:
                continue
            match self._decoder.decode(data):
                case Hello():
                    self._send(router, self._info)
                case Ping():
                    self._send(router, self._load())
                case GetStatus():
                    self._send(router, NodeStatus(self._info, self._load(), 1.0, **self.status))
                case GetTokenizer():
                    files = TokenizerFiles(tokenizer_id=self.gives_tokenizer, files=self._files)
                    self.tokenizers_given.put_nowait(self.gives_tokenizer)
                    self._send(router, files)
                case AddRequest() as request:
                    self._routers[request.id] = router
                    self.requests.put_nowait(request)
                    if not self.manual:
                        self.on_request(request)
                case Meet() as meet:
                    self.met.put_nowait(meet)
                case AbortRequests(ids=ids):
                    for request_id in ids:
                        self.aborted.put_nowait(request_id)

    def _load(self) -> NodeLoad:
        return NodeLoad(
            boot_id=self.boot_id,
            draining=self.draining,
            running=0,
            waiting=0,
            handoffs=0,
            blocks_total=10,
            blocks_free=10,
            blocks_cached=0,
            blocks_held=0,
            blocks_in_use=0,
        )

    def _send(self, router: bytes, message: Message) -> None:
        self._socket.send_multipart([router, encode(message)])


def made_up_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The chosen token at -0.5, and ``num_top`` neighbours from it downwards."""
    top = [(token_id + i, -0.5 - i) for i in range(num_top)]
    return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)
