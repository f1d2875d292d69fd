"""Starts attempts on nodes, delivers what the nodes answer to the request that waits for it, and aborts.

Only the router starts attempts; each has a fresh id that no client can know or choose.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Protocol

from pdserve_protocol.errors import NodeUnreachable
from pdserve_protocol.requests import AbortRequests, AddRequest, ReceiveFrom, SendTo

from pdserve_router.backlog import Backlog
from pdserve_router.errors import NodeLost, NotReady, RouterError
from pdserve_router.lifecycle import AttemptLife, Half, Progress
from pdserve_router.placement import Placed, Placement
from pdserve_router.retries import MAX_RETRIES, is_worth_another, to_avoid

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pdserve_protocol.outputs import RequestOutput
    from pdserve_protocol.sampling import SamplingParams

    from pdserve_router.metrics import RouterMetrics
    from pdserve_router.proof import Mode
    from pdserve_router.registry import Node, ServedModel

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Takes care of what nodes say while its task waits, so that no task is woken for every token."""

    def take(self) -> bool:
        """There is something to ``poll``. True ends the task's wait, and so does what this raises."""
        ...

    def flush(self) -> None:
        """Everything that came at the same time has been taken, by all listeners."""
        ...


class Attempt:
    """One try at one request, on one or two nodes. Used by the one task that serves the request.

    Attributes:
        nodes: the node of each half; the first one computes the prompt.
        reason: why there is one where there could be two.
        boot_ids: the process of each half.
        life: what has become of it.
        num_retries: attempts at the same before this one.
        avoided: names of nodes that were left out because of earlier attempts.
        exact: these nodes compute as those did that made the tokens before.
    """

    def __init__(
        self,
        attempt_id: str,
        placed: Placed,
        *,
        num_prompt_logprobs: int = 0,
        num_forced: int = 0,
        num_retries: int = 0,
    ) -> None:
        self.id = attempt_id
        self.num_retries = num_retries
        self.exact = True
        self.avoided: set[str] = set()
        self.mode: Mode = placed.mode
        self.reason = placed.reason
        self.nodes = nodes = placed.nodes
        self.numerics = {node.info.identity.numerics for node in nodes.values() if node.info is not None}
        self.boot_ids = {half: node.boot_id for half, node in nodes.items()}
        self.life = AttemptLife({half: node.name for half, node in nodes.items()}, num_prompt_logprobs, num_forced)
        self._inbox: deque[tuple[Half, RequestOutput | NodeLost]] = deque()
        self._verdict: RouterError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Listener | None = None

    def deliver(self, half: Half, item: RequestOutput | NodeLost) -> None:
        """An output of a half, or that there will be none. Never blocks; ``announce`` says that it is there."""
        self._inbox.append((half, item))

    def announce(self) -> None:
        """Tell whoever waits. Never blocks."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            if self._listener is None or self._listener.take():
                waiter.set_result(None)
        except Exception as error:  # whatever it is, it is this request's and not its neighbours'
            waiter.set_exception(error)

    def flush(self) -> None:
        if self._listener is not None:
            self._listener.flush()

    def fail(self, error: RouterError) -> None:
        """End the attempt with ``error``, whatever its nodes say."""
        self._verdict = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def poll(self) -> Progress | None:
        """The next tokens, or the end; None where ``wait`` is what there is to do.

        Raises:
            RouterError: the attempt failed.
        """
        if self._verdict is not None and not self.life.ended:
            self.life.stop()
            raise self._verdict
        while self._inbox:
            half, item = self._inbox.popleft()
            if isinstance(item, NodeLost):
                self.life.on_lost(half, item)
                continue
            progress = self.life.on_output(half, item)
            if progress.token_ids or progress.finished is not None:
                return progress
        return None

    async def wait(self, listener: Listener | None = None) -> None:
        """Until a node has said something, or until ``listener`` needs its task. The caller sets the deadline."""
        if self._inbox or (self._verdict is not None and not self.life.ended):
            return
        self._waiter = asyncio.get_running_loop().create_future()
        self._listener = listener
        try:
            await self._waiter
        finally:
            self._listener = None

    def node_name(self, half: Half) -> str | None:
        return self.nodes[half].name if half in self.nodes else None


class Dispatcher:
    """Args:
    disaggregated: prefill nodes are configured.
    local_prefill: decode nodes also compute prompts where that starts a stream earlier.
    """

    def __init__(self, metrics: RouterMetrics, *, disaggregated: bool, local_prefill: bool = True) -> None:
        self._metrics = metrics
        self._backlog = Backlog()
        self._placement = Placement(metrics, self._backlog, disaggregated=disaggregated, local_prefill=local_prefill)
        self._live: dict[str, Attempt] = {}
        # By name of a node that is not there: attempts given up meanwhile, each with the process that may have it.
        self._owed_aborts: defaultdict[str, dict[str, str | None]] = defaultdict(dict)

    def start(
        self,
        served: ServedModel,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        timeout_s: float,
        client_id: str,
        cache_salt: str,
        priority: int,
        choice: int = 0,
        beside: Attempt | None = None,
        seen: Sequence[int] = (),
        num_retries: int = 0,
        avoid: Collection[str] = (),
    ) -> Attempt:
        """Send the halves of a request to the nodes chosen for it: those of ``beside``, if they are still there.

        Where the decode node of ``beside`` has taken its prompt over, it is asked alone, and goes on from that prompt.

        The caller must ``close`` the attempt, whatever happens.

        Args:
            seen: output tokens that the client has; the nodes go on after them.
            num_retries: attempts at the same before this one.
            avoid: names of nodes that are not to have it.

        Raises:
            NotReady: no node can take it.
            NodeLost: a chosen node died just now.
        """
        num_tokens = len(prompt_token_ids) + len(seen)
        if beside is not None and all(node.boot_id == beside.boot_ids[half] for half, node in beside.nodes.items()):
            placed = Placed(beside.mode, beside.nodes, beside.reason)
            if beside.life.has_forkable_prompt:
                # Nothing is computed or transferred for it again: the prompt is in the decode node's cache.
                placed = Placed("forked", {Half.DECODE: placed.nodes[Half.DECODE]})
            num_tokens = 0
        else:
            placed = self._placement.place(served, num_tokens, sampling.max_tokens - len(seen), avoid)
        nodes = placed.nodes
        num_prompt_logprobs = len(prompt_token_ids) - 1 if sampling.prompt_logprobs is not None else 0
        attempt = Attempt(
            secrets.token_hex(16),
            placed,
            num_prompt_logprobs=num_prompt_logprobs,
            num_forced=len(seen),
            num_retries=num_retries,
        )
        self._live[attempt.id] = attempt
        prefill, decode = nodes.get(Half.PREFILL), nodes.get(Half.DECODE)
        names = [node.name for node in nodes.values()]
        self._backlog.opened(attempt.id, names, prefiller=names[0], num_tokens=num_tokens)
        sent = False
        try:
            for half, node in nodes.items():
                send_to = receive_from = None
                if half is Half.PREFILL and decode is not None:
                    send_to = _send_to(decode)
                if half is Half.DECODE and prefill is not None:
                    receive_from = ReceiveFrom(boot_id=_boot(prefill))
                node.client.send(
                    AddRequest(
                        id=attempt.id,
                        boot_id=_boot(node),
                        prompt_token_ids=prompt_token_ids,
                        sampling=sampling,
                        output_token_ids=list(seen),
                        timeout_s=timeout_s,
                        send_to=send_to,
                        receive_from=receive_from,
                        choice=choice,
                        client_id=client_id,
                        cache_salt=cache_salt,
                        priority=priority,
                    )
                )
            sent = True
        except NodeUnreachable as error:
            raise NodeLost(f"{half.value} node {node.name}") from error
        finally:
            if not sent:
                self.close(attempt)
        return attempt

    def restart(
        self,
        failed: Attempt,
        error: RouterError,
        served: ServedModel,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        seen: Sequence[int],
        timeout_s: float,
        client_id: str,
        cache_salt: str,
        priority: int,
        choice: int,
    ) -> Attempt:
        """Another attempt in the place of one that ended with ``error``, which is closed.

        Raises:
            RouterError: ``error``, if another one is of no use or there is nobody for it.
        """
        self.close(failed)
        if failed.num_retries == MAX_RETRIES or not is_worth_another(error) or len(seen) >= sampling.max_tokens:
            raise error
        names = {half: node.name for half, node in failed.nodes.items()}
        decode_nodes = [node.name for node in served.decode if node.name not in failed.avoided]
        avoid = failed.avoided | to_avoid(error, names, decode_nodes)
        try:
            attempt = self.start(
                served,
                prompt_token_ids,
                sampling,
                timeout_s=timeout_s,
                client_id=client_id,
                cache_salt=cache_salt,
                priority=priority,
                choice=choice,
                seen=seen,
                num_retries=failed.num_retries + 1,
                avoid=avoid,
            )
        except (NotReady, NodeLost):
            raise error from None
        attempt.avoided = avoid
        attempt.exact = failed.exact and (not seen or failed.numerics == attempt.numerics)
        self._metrics.retries.labels(error.code or "").inc()
        log.warning("request %s goes on elsewhere after %d tokens: %s", client_id, len(seen), error)
        return attempt

    def close(self, attempt: Attempt) -> None:
        """Forget an attempt, and abort what still runs of it and is not about to end. Idempotent, never blocks."""
        life = attempt.life
        if self._live.pop(attempt.id, None) is None:
            return
        self._backlog.closed(attempt.id)
        # Where the first token was the last, a decode half waits for its peer, whom it may never hear.
        if life.completed and Half.DECODE not in life.open_halves:
            return
        life.stop()
        for half in life.open_halves:
            node = attempt.nodes[half]
            if node.boot_id != attempt.boot_ids[half]:
                continue
            try:
                node.client.send(AbortRequests(ids=[attempt.id]))
            except NodeUnreachable:
                log.info("attempt %s: %s is gone, nothing to abort there", attempt.id, node.name)

    def fail_all(self, error: RouterError) -> None:
        """End every attempt with ``error``."""
        for attempt in list(self._live.values()):
            attempt.fail(error)

    def on_outputs(self, node: Node, outputs: Sequence[RequestOutput]) -> None:
        live, spoken_of = self._live, {}
        half = Half(node.role)
        for output in outputs:
            attempt = live.get(output.id)
            if attempt is not None:
                attempt.deliver(half, output)
                if output.token_ids or output.end is not None:
                    self._backlog.started(attempt.id, output.prefill.computed_tokens if output.prefill else None)
                spoken_of[output.id] = attempt
        for attempt in spoken_of.values():
            attempt.announce()
        # Clients' sockets are written to in one go: each write alone would wake whoever reads it.
        for attempt in spoken_of.values():
            attempt.flush()

    def on_change(self, node: Node) -> None:
        for attempt in list(self._live.values()):
            for half, user in attempt.nodes.items():
                if user is node and attempt.boot_ids[half] != node.boot_id:
                    self._owed_aborts[node.name][attempt.id] = attempt.boot_ids[half]
                    attempt.deliver(half, NodeLost(f"{half.value} node {node.name}"))
                    attempt.announce()
                    attempt.flush()
        if node.boot_id is not None:
            self._settle_aborts(node)

    def _settle_aborts(self, node: Node) -> None:
        """A node is there: if it only could not be reached, a request to it may still have arrived, late."""
        owed = self._owed_aborts.pop(node.name, {})
        ids = [attempt_id for attempt_id, boot_id in owed.items() if boot_id == node.boot_id]
        if ids:
            try:
                node.client.send(AbortRequests(ids=ids))
            except NodeUnreachable:
                self._owed_aborts[node.name] = owed


def _boot(node: Node) -> str:
    if node.boot_id is None:
        raise NodeLost(f"{node.role} node {node.name}")
    return node.boot_id


def _send_to(node: Node) -> SendTo:
    """Where the prefill node finds ``node``: as its operator said, else where the router found it."""
    if node.info is None:
        raise NodeLost(f"{node.role} node {node.name}")
    host = node.info.advertise_host or node.client.address.host
    return SendTo(host=host, port=node.info.port, boot_id=node.info.identity.boot_id)
