"""The same request on both paths: through a prefill and a decode node, and on that decode node alone.

Both paths end in the same decode node, behind a router each, so that either one can be used to bring the prefix caches
into a given state. Token ids are read back from the texts in ``logprobs``, which are distinct.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from pdserve_protocol.client import EngineCoreClient
from pdserve_protocol.door import Address
from pdserve_protocol.node import ResetPrefixCache
from pdserve_text.files import load_tokenizer_files
from pdserve_text.tokenizer import Tokenizer

from support.cluster import Cluster, node_status, port_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pdserve_protocol.node import NodeStatus
    from transformers import PreTrainedModel

    from support.cluster import Process


@dataclass(frozen=True)
class Output:
    """An answer. ``token_ids`` lack an end token and the tokens of a stop string, as ``logprobs`` do."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: dict[str, Any]
    usage: dict[str, Any]
    proof: dict[str, Any] = field(compare=False)


class Paths:
    """The two ways to the same tokens.

    Attributes:
        disaggregated: router -> prefill node -> decode node.
        aggregated: router -> the same decode node.
    """

    def __init__(self, disaggregated: Cluster, aggregated: Cluster, tokenizer: Tokenizer) -> None:
        self.disaggregated = disaggregated
        self.aggregated = aggregated
        self.tokenizer = tokenizer
        self.prefill, self.decode = disaggregated.prefill[0], disaggregated.decode[0]
        self._ids = {_logprobs_text(tokenizer, token_id): token_id for token_id in range(tokenizer.vocab_size)}
        assert len(self._ids) == tokenizer.vocab_size, "two tokens have the same text"

    def run(self, path: Cluster, prompt: Sequence[int], **parameters: Any) -> Output:
        """One completion, greedy and without regard to end tokens unless ``parameters`` say otherwise."""
        body = {"temperature": 0, "ignore_eos": True, "logprobs": 0, **parameters}
        answer = path.complete(list(prompt), **body)
        choice = answer["choices"][0]
        token_ids = [self._ids[text] for text in choice["logprobs"]["tokens"]]
        usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        return Output(token_ids, choice["text"], choice["finish_reason"], choice["logprobs"], usage, answer["pdserve"])

    def run_both(self, prompt: Sequence[int], **parameters: Any) -> tuple[Output, Output]:
        """Disaggregated and aggregated, each from empty caches."""
        outputs = []
        for path in (self.disaggregated, self.aggregated):
            self.reset(self.prefill, self.decode)
            outputs.append(self.run(path, prompt, **parameters))
        return outputs[0], outputs[1]

    def run_all(
        self, path: Cluster, requests: Sequence[tuple[Sequence[int], dict[str, Any]]], at_once: int = 8
    ) -> list[Output]:
        """Many at the same time; the outputs in the order of the requests."""
        with ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(self.run, path, prompt, **parameters) for prompt, parameters in requests]
            return [future.result() for future in futures]

    def cache(self, node: Process, token_ids: Sequence[int]) -> None:
        """Brings the KV of these tokens into the prefix cache of that node alone."""
        if not token_ids:
            return
        # With one token to generate no decode node takes part.
        path = self.disaggregated if node is self.prefill else self.aggregated
        self.run(path, token_ids, max_tokens=1)
        self.disaggregated.wait_until_idle()

    def reset(self, *nodes: Process) -> None:
        """Empties the prefix caches of these nodes."""
        self.disaggregated.wait_until_idle()
        for node in nodes:
            left = asyncio.run(_reset_prefix_cache(_address(node)))
            assert left == 0, f"{left} blocks of {node.name} are still in use"

    def status(self, node: Process) -> NodeStatus:
        return node_status(_address(node))


@contextmanager
def start_paths(model: str, tokenizer_folder: Path, folder: Path, *node_args: str) -> Iterator[Paths]:
    """A prefill node, a decode node and two routers."""
    with Cluster(model=model, folder=folder, node_args=node_args) as disaggregated:
        aggregated = Cluster(model=model, folder=folder, num_prefill=0)
        aggregated.router = aggregated.start_router([port_of(disaggregated.decode[0].ready_line)], 0)
        try:
            aggregated.port = port_of(aggregated.router.wait_ready())
            aggregated.wait_until_ready()
            tokenizer = Tokenizer.from_files(load_tokenizer_files(tokenizer_folder))
            yield Paths(disaggregated, aggregated, tokenizer)
        finally:
            aggregated.router.close()


def reference(model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What the implementation of transformers generates, greedily."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


def _address(node: Process) -> Address:
    return Address("127.0.0.1", port_of(node.ready_line))


async def _reset_prefix_cache(address: Address) -> int:
    client = EngineCoreClient(address)
    await client.start()
    try:
        left: int = (await client.ask(ResetPrefixCache())).blocks_left
        return left
    finally:
        await client.close()


def _logprobs_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text that /v1/completions has for a token in ``logprobs``."""
    piece = tokenizer.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
