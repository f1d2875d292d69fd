"""The nodes of this router: who is up, what they serve, and the tokenizers they handed over.

Owns the clients. Knows nothing of requests: outputs and changes of a node are passed on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve_protocol.client import EngineCoreClient
from pdserve_protocol.errors import ProtocolError
from pdserve_protocol.node import GetTokenizer, TokenizerFiles
from pdserve_text.errors import TextError

from pdserve_router.errors import ModelNotFound, NotReady
from pdserve_router.text_model import TextModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.door import Address
    from pdserve_protocol.node import NodeInfo, NodeLoad, Role
    from pdserve_protocol.outputs import Outputs

log = logging.getLogger(__name__)

_TOKENIZER_TIMEOUT_S = 10.0
_TOKENIZER_RETRY_S = 1.0


class NodeListener(Protocol):
    """Who works with the nodes' answers. Both are called on the event loop and must not block."""

    def on_outputs(self, node: Node, outputs: Outputs) -> None: ...

    def on_change(self, node: Node) -> None:
        """The node came up, died, or is another process than before."""
        ...


class Node:
    """One address of the command line and whoever answers there."""

    def __init__(self, role: Role, client: EngineCoreClient) -> None:
        self.role: Role = role
        self.client = client
        self.name = str(client.address)
        self.refused: str | None = None

    @property
    def info(self) -> NodeInfo | None:
        return self.client.info

    @property
    def load(self) -> NodeLoad | None:
        return self.client.load

    @property
    def boot_id(self) -> str | None:
        return self.client.info.identity.boot_id if self.client.info else None

    @property
    def usable(self) -> bool:
        """Alive, of the right kind, and taking requests."""
        return self.client.info is not None and self.refused is None and not (self.load and self.load.draining)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model name and the usable nodes behind it, which all agree about the model and its tokenizer.

    Attributes:
        limit: prompt and output tokens of one request that each of these nodes can take.
        vocab_size: token ids that each of them knows.
    """

    name: str
    prefill: Sequence[Node]
    decode: Sequence[Node]
    limit: int
    vocab_size: int
    text: TextModel


class NodeRegistry:
    """Args:
    text: overrides what the nodes hand over.
    """

    def __init__(
        self,
        *,
        prefill: Sequence[Address],
        decode: Sequence[Address],
        cluster_key: str | None,
        text: TextModel | None = None,
    ) -> None:
        self._by_client: dict[EngineCoreClient, Node] = {}
        for role, addresses in (("prefill", prefill), ("decode", decode)):
            for address in addresses:
                client = EngineCoreClient(
                    address, cluster_key=cluster_key, on_outputs=self._on_outputs, on_change=self._on_change
                )
                self._by_client[client] = Node(role, client)  # type: ignore[arg-type]
        self._override = text
        self._texts: dict[str, TextModel] = {}
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._names: set[str] = set()
        self._listener: NodeListener | None = None

    @property
    def nodes(self) -> list[Node]:
        return list(self._by_client.values())

    def of_role(self, role: Role) -> list[Node]:
        """Nodes given as ``role``, in the order of the command line."""
        return [node for node in self._by_client.values() if node.role == role]

    async def start(self, listener: NodeListener) -> None:
        """Connect to all nodes; returns at once, whether they are up or not."""
        self._listener = listener
        for client in self._by_client:
            await client.start()

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        for task in self._fetches.values():
            task.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        self._fetches.clear()
        for client in self._by_client:
            await client.close()

    def model_names(self) -> list[str]:
        """Names that usable nodes serve now."""
        return sorted({node.info.served_model_name for node in self.nodes if node.usable and node.info})

    def resolve(self, model: str | None) -> ServedModel:
        """The model that a request names; None is the only one served.

        Raises:
            ModelNotFound: no node serves, or ever served, this name.
            NotReady: its nodes are down, or the tokenizer is not here yet.
        """
        names = self.model_names()
        if model is None and len(names) == 1:
            model = names[0]
        if model is not None and model not in names and (names or self._names) and model not in self._names:
            raise ModelNotFound(model, names)
        if not names or (model is not None and model not in names):
            raise NotReady("No node that could serve this request is up")
        if model is None:
            raise ModelNotFound("", names)
        prefill, decode = self._group(model)
        infos = [node.info for node in (*prefill, *decode) if node.info]
        text = self._override or self._texts.get(infos[0].identity.tokenizer_id)
        if text is None:
            raise NotReady("The tokenizer has not arrived from the nodes yet")
        return ServedModel(
            name=model,
            prefill=prefill,
            decode=decode,
            limit=min(min(info.max_model_len, info.kv_capacity_tokens) for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
            text=text,
        )

    def _group(self, model: str) -> tuple[list[Node], list[Node]]:
        """Usable nodes of a name that equal the first of them, decode nodes before prefill nodes."""
        group = [
            node
            for node in (*self.of_role("decode"), *self.of_role("prefill"))
            if node.usable and node.info and node.info.served_model_name == model
        ]
        ids = [(n.info.identity.model_id, n.info.identity.tokenizer_id) if n.info else None for n in group]
        alike = [node for node, identity in zip(group, ids, strict=True) if identity == ids[0]]
        return [n for n in alike if n.role == "prefill"], [n for n in alike if n.role == "decode"]

    def _on_outputs(self, client: EngineCoreClient, outputs: Outputs) -> None:
        if self._listener is not None:
            self._listener.on_outputs(self._by_client[client], outputs)

    def _on_change(self, client: EngineCoreClient) -> None:
        node = self._by_client[client]
        info = client.info
        if info is None:
            log.warning("%s node %s is unreachable", node.role, node.name)
        else:
            self._greet(node, info)
        if self._listener is not None:
            self._listener.on_change(node)

    def _greet(self, node: Node, info: NodeInfo) -> None:
        node.refused = None
        if info.identity.role != node.role:
            node.refused = f"given as --{node.role}, but it is a {info.identity.role} node"
            log.error("%s is not used: %s", node.name, node.refused)
            return
        log.info(
            "%s node %s is up: model %s, boot %s", node.role, node.name, info.served_model_name, info.identity.boot_id
        )
        self._names.add(info.served_model_name)
        for other in self.nodes:
            if other.info and other.info.served_model_name == info.served_model_name and other.refused is None:
                for name in ("model_id", "tokenizer_id"):
                    if getattr(other.info.identity, name) != getattr(info.identity, name):
                        log.error(
                            "%s and %s both serve %s, but their %s differs: only one of them is used",
                            node.name,
                            other.name,
                            info.served_model_name,
                            name,
                        )
        tokenizer_id = info.identity.tokenizer_id
        if self._override is None and tokenizer_id not in self._texts and tokenizer_id not in self._fetches:
            self._fetches[tokenizer_id] = asyncio.create_task(self._fetch(tokenizer_id))

    async def _fetch(self, tokenizer_id: str) -> None:
        """Get one tokenizer from any node that has it; try again for as long as there is none."""
        loop = asyncio.get_running_loop()
        while True:
            for node in self.nodes:
                if node.info is None or node.info.identity.tokenizer_id != tokenizer_id:
                    continue
                try:
                    files = await node.client.ask(GetTokenizer(), _TOKENIZER_TIMEOUT_S)
                    if isinstance(files, TokenizerFiles) and files.tokenizer_id == tokenizer_id:
                        self._texts[tokenizer_id] = await loop.run_in_executor(None, TextModel.from_files, files.files)
                        log.info("tokenizer %s came from %s", tokenizer_id, node.name)
                        return
                except (ProtocolError, TextError) as error:
                    log.error("no tokenizer from %s: %s", node.name, error)
            await asyncio.sleep(_TOKENIZER_RETRY_S)
