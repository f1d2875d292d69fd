"""The nodes of this router: who is up, what they serve, and the tokenizers they handed over.

Owns the clients. Knows nothing of requests: outputs and changes of a node are passed on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve_protocol.client import EngineCoreClient
from pdserve_protocol.codec import PROTOCOL_VERSION
from pdserve_protocol.errors import NodeUnreachable, ProtocolError, VersionMismatch
from pdserve_protocol.handoff import Meet
from pdserve_protocol.node import GetTokenizer, TokenizerFiles, mismatch
from pdserve_protocol.requests import SendTo
from pdserve_text.errors import TextError

from pdserve_router.errors import ModelNotFound, NotReady
from pdserve_router.text_model import TextModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve_protocol.door import Address
    from pdserve_protocol.node import NodeInfo, NodeLoad, Role
    from pdserve_protocol.outputs import RequestOutput

log = logging.getLogger(__name__)

_TOKENIZER_TIMEOUT_S = 10.0
_TOKENIZER_RETRY_S = 1.0
_MEET_AGAIN_S = 5.0


class NodeListener(Protocol):
    """Who works with the nodes' answers. Both are called on the event loop and must not block."""

    def on_outputs(self, node: Node, outputs: Sequence[RequestOutput]) -> None: ...

    def on_change(self, node: Node) -> None:
        """The node came up, died, or is another process than before."""
        ...


class Node:
    """One address of the command line and whoever answers there.

    Attributes:
        refused: why it is not used although it is there.
    """

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
    def send_to(self) -> SendTo | None:
        """Where its peers find it: as its operator said, else where the router found it."""
        if self.info is None:
            return None
        host = self.info.advertise_host or self.client.address.host
        return SendTo(host=host, port=self.info.port, boot_id=self.info.identity.boot_id)

    @property
    def usable(self) -> bool:
        """Alive, of the right kind, and taking requests."""
        return self.client.info is not None and self.refused is None and not (self.load and self.load.draining)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model name and the usable nodes behind it, which all agree about the model and its tokenizer.

    Attributes:
        model_id: hash of configuration and weights.
        limit: prompt and output tokens of one request that each of these nodes can take.
        vocab_size: token ids that each of them knows.
    """

    name: str
    model_id: str
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
        self._unusable: dict[str, TextError] = {}
        self._arrived: list[Node] = []
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._names: set[str] = set()
        self._listener: NodeListener | None = None
        self._meetings: asyncio.Task[None] | None = None

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
        self._meetings = asyncio.create_task(self._keep_introduced())

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        tasks = [*self._fetches.values(), *([self._meetings] if self._meetings is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fetches.clear()
        for client in self._by_client:
            await client.close()

    def model_names(self) -> list[str]:
        """Names that usable nodes serve now."""
        return sorted({node.info.served_model_name for node in self.nodes if node.usable and node.info})

    def has_pair(self) -> bool:
        """Whether there are a prefill and a decode node, both usable, that can work together."""
        return any(
            p.info.served_model_name == d.info.served_model_name and mismatch(p.info.identity, d.info.identity) is None
            for p in self.of_role("prefill")
            for d in self.of_role("decode")
            if p.usable and d.usable and p.info and d.info
        )

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
        group = [node for node in self.nodes if node.usable and node.info and node.info.served_model_name == model]
        infos = [node.info for node in group if node.info]
        text = self._override or self._texts.get(infos[0].identity.tokenizer_id)
        if text is None:
            raise NotReady("The tokenizer has not arrived from the nodes yet")
        return ServedModel(
            name=model,
            model_id=infos[0].identity.model_id,
            prefill=[node for node in group if node.role == "prefill"],
            decode=[node for node in group if node.role == "decode"],
            limit=min(min(info.max_model_len, info.kv_capacity_tokens) for info in infos),
            vocab_size=min(info.vocab_size for info in infos),
            text=text,
        )

    def _on_outputs(self, client: EngineCoreClient, outputs: Sequence[RequestOutput]) -> None:
        if self._listener is not None:
            self._listener.on_outputs(self._by_client[client], outputs)

    def _on_change(self, client: EngineCoreClient) -> None:
        node = self._by_client[client]
        info = client.info
        if node in self._arrived:
            self._arrived.remove(node)
        if info is None:
            node.refused = None
            log.warning("%s node %s is unreachable", node.role, node.name)
        else:
            log.info(
                "%s node %s is up: model %s, boot %s",
                node.role,
                node.name,
                info.served_model_name,
                info.identity.boot_id,
            )
            self._arrived.append(node)
        self._judge()
        self._introduce()
        if self._listener is not None:
            self._listener.on_change(node)

    def _introduce(self) -> None:
        """Tell the nodes of each name who works with them, so that their links are up before a request needs them."""
        for node in self._arrived:
            if node.info is None or not node.usable:
                continue
            name, role = node.info.served_model_name, node.role
            others = [n for n in self._arrived if n.role != role and n.usable]
            peers = [n.send_to for n in others if n.send_to and n.info and n.info.served_model_name == name]
            try:
                if peers:
                    node.client.send(Meet(peers=peers))
            except NodeUnreachable:
                log.info("%s node %s has gone before it could be told of its peers", node.role, node.name)

    async def _keep_introduced(self) -> None:
        """Say it again and again: no request goes over a link that was lost, so none would bring it up."""
        while True:
            await asyncio.sleep(_MEET_AGAIN_S)
            self._introduce()

    def _judge(self) -> None:
        """Decide again who is refused. The first usable node of a name says which model and tokenizer it means."""
        first: dict[str, tuple[Node, NodeInfo]] = {}
        for node in self._arrived:
            if node.info is None:
                continue
            name = node.info.served_model_name
            refused = self._objection(node, node.info, first.get(name))
            if refused is not None and refused != node.refused:
                log.error("%s is not used: %s", node.name, refused)
            node.refused = refused
            if refused is None:
                first.setdefault(name, (node, node.info))
                self._names.add(name)
                self._want_tokenizer(node.info.identity.tokenizer_id)

    def _objection(self, node: Node, info: NodeInfo, first: tuple[Node, NodeInfo] | None) -> str | None:
        identity = info.identity
        if identity.role != node.role:
            return f"given as --{node.role}, but it is a {identity.role} node"
        if identity.version != PROTOCOL_VERSION:
            return str(VersionMismatch(PROTOCOL_VERSION, identity.version))
        if self._override is None and identity.tokenizer_id in self._unusable:
            return f"its tokenizer cannot be used: {self._unusable[identity.tokenizer_id]}"
        if first is not None:
            other, known = first
            for name in ("model_id", "tokenizer_id"):
                if getattr(known.identity, name) != getattr(identity, name):
                    return f"it serves {info.served_model_name} as {other.name} does, but its {name} differs"
        return None

    def _want_tokenizer(self, tokenizer_id: str) -> None:
        if self._override is None and tokenizer_id not in self._texts and tokenizer_id not in self._fetches:
            self._fetches[tokenizer_id] = asyncio.create_task(self._fetch(tokenizer_id))

    async def _fetch(self, tokenizer_id: str) -> None:
        """Get one tokenizer from the nodes that have it, in turn, for as long as there are any."""
        for attempt in itertools.count():
            owners = [n for n in self._arrived if n.info and n.info.identity.tokenizer_id == tokenizer_id]
            if not owners or await self._fetch_from(owners[attempt % len(owners)], tokenizer_id):
                break
            await asyncio.sleep(_TOKENIZER_RETRY_S)
        del self._fetches[tokenizer_id]
        self._judge()

    async def _fetch_from(self, node: Node, tokenizer_id: str) -> bool:
        """Whether the tokenizer is here now, or known to be of no use."""
        try:
            files = await node.client.ask(GetTokenizer(), _TOKENIZER_TIMEOUT_S)
        except ProtocolError as error:
            log.error("no tokenizer from %s: %s", node.name, error)
            return False
        if not isinstance(files, TokenizerFiles) or files.tokenizer_id != tokenizer_id:
            return False
        loop = asyncio.get_running_loop()
        try:
            self._texts[tokenizer_id] = await loop.run_in_executor(None, TextModel, files.files)
        except TextError as error:
            # The same files would fail in the same way.
            self._unusable[tokenizer_id] = error
        else:
            log.info("tokenizer %s came from %s", tokenizer_id, node.name)
        return True
