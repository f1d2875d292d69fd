"""EngineCoreProc: the event loop of a node process.

One thread owns the scheduler, the KV cache manager and the hand-off state machines, and blocks on one inbox: messages
from the door, the end of a step, what the mover did. A step runs on the worker's thread meanwhile, so that offers are
granted and aborts are heeded while it computes. There is nothing here to lock.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections import deque
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from pdserve_kv_transfer.events import MoverDied, MoverEvent
from pdserve_kv_transfer.link import stale_boot
from pdserve_protocol.handoff import Meet, PeerMessage, Retarget
from pdserve_protocol.node import (
    GetStatus,
    GetTokenizer,
    Hello,
    NodeInfo,
    NodeLoad,
    NodeStatus,
    PrefixCacheReset,
    ResetPrefixCache,
    TokenizerFiles,
)
from pdserve_protocol.outputs import Aborted, Failed, Outputs, RequestOutput
from pdserve_protocol.requests import MAX_OPEN_PROMPT_TOKENS, AbortRequests, AddRequest

from pdserve_engine.door import Arrived, DoorDied, DoorEvent, VisitorSilent
from pdserve_engine.errors import RequestRejected, StepNotRun
from pdserve_engine.handoff_stats import merged
from pdserve_engine.outbox import OpenRequest, Outbox
from pdserve_engine.receiving import Receiving, transfer_proof
from pdserve_engine.request import RequestStatus
from pdserve_engine.sending import Sending

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import FrameType

    from pdserve_kv_transfer.mover import Mover
    from pdserve_protocol.inbox import Inbox
    from pdserve_protocol.outputs import ErrorCode
    from pdserve_text.grammar import GrammarMatcher

    from pdserve_engine.core import EngineCore
    from pdserve_engine.door import NodeDoor, Route, Visitor
    from pdserve_engine.process_memory import ProcessMemory
    from pdserve_engine.receiving import ReceivePolicy
    from pdserve_engine.request import Request
    from pdserve_engine.scheduler import StepResult
    from pdserve_engine.scheduler_output import ModelRunnerOutput
    from pdserve_engine.sending import SendPolicy

log = logging.getLogger(__name__)

TICK_S = 0.1
TURN_S = 0.002
"""How long messages are dealt with before the next step is looked after; the rest comes in the next turn. About as long
as a step is queued ahead of the end of the one under way, so that streams wait no longer however much arrives."""
MAX_OPEN_REQUESTS = 4096


@dataclass(frozen=True, slots=True)
class StepDone:
    """The oldest step in flight is over, well or not."""

    future: Future[ModelRunnerOutput]
    ended_at: float


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The grammar of a request is compiled, well or not."""

    request: Request
    future: Future[GrammarMatcher]


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what is here, take nothing new, end."""


Event = DoorEvent | MoverEvent | StepDone | GrammarCompiled | Drain


class EngineCoreProc:
    """A node. ``run`` returns when it has been drained.

    Args:
        inbox: where door and mover post their events.
        send_policy, receive_policy: None where this node does not hand over, or does not take over.
        memory: what its status tells of it; None tells nothing.
        clock: seconds, from any thread.
    """

    def __init__(
        self,
        core: EngineCore,
        mover: Mover,
        door: NodeDoor,
        inbox: Inbox[Event],
        info: NodeInfo,
        tokenizer: TokenizerFiles,
        *,
        send_policy: SendPolicy | None,
        receive_policy: ReceivePolicy | None,
        drain_timeout_s: float,
        memory: ProcessMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        identity = info.identity
        self.core = core
        self.info = info
        self.inbox = inbox
        self._mover = mover
        self._door = door
        self._tokenizer = tokenizer
        self._drain_timeout_s = drain_timeout_s
        self._memory = memory
        self._clock = clock
        self._hands_over = send_policy is not None
        self._takes_over = receive_policy is not None
        self._heard: deque[Arrived | VisitorSilent] = deque()
        self._outbox = Outbox()
        self._sending = Sending(core, mover, door, identity, send_policy, self._outbox.put)
        self._receiving = Receiving(core, mover, door, identity, receive_policy, self._outbox.put, self._on_result)
        self._started_at = self._clock()
        self._ticked_at = self._started_at
        self._drain_deadline: float | None = None

    # ---- the loop --------------------------------------------------------------------------------------------------

    def drain_on_signals(self) -> None:
        """SIGTERM and SIGINT drain; a second one ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._drain_deadline is not None:
            # Not by an exception: the loop may be anywhere, also where one would be lost.
            logging.shutdown()
            os._exit(1)
        self.inbox.put(Drain())

    def run(self) -> None:
        """Serves until drained. Raises what has killed the door, the mover or the loop itself."""
        self._door.start(self._load())
        try:
            while not self._drained():
                self._turn()
        finally:
            self._door.close()
            self._mover.close()
            self.core.close()

    def _turn(self) -> None:
        """What has happened, then the next step, then one message to each router that has to hear of it."""
        for event in self._wait():
            if isinstance(event, Arrived | VisitorSilent):
                self._heard.append(event)
            else:
                self._handle(event, self._clock())
        self._take_messages()
        now = self._clock()
        if now - self._ticked_at >= TICK_S:
            self._tick(now)
        self._receiving.grant_waiting(now)
        self._begin_step(self._clock())
        self._flush()

    def _take_messages(self) -> None:
        """In their order, all that are there; of many that take long some, where others wait for a step."""
        until = self._clock() + TURN_S if self.core.scheduler.has_schedulable() else inf
        while self._heard:
            event = self._heard.popleft()
            self._handle(event, self._clock())
            if isinstance(event, Arrived):
                self._door.taken(1)
            if self._clock() >= until:
                return

    def _wait(self) -> list[Event]:
        is_active = bool(
            self._outbox or self._drain_deadline is not None or self._sending.is_active() or self._receiving.is_active()
        )
        if not is_active:
            self._door.set_load(self._load())
        timeout = TICK_S if is_active else None
        until_step = self.core.pace.queue_at - self._clock()
        if self._heard:
            timeout = 0.0
        elif 0 < until_step < TICK_S:
            timeout = until_step
        events: list[Event] = []
        try:
            events.append(self.inbox.get(timeout=timeout))
            while True:
                events.append(self.inbox.get_nowait())
        except queue.Empty:
            return events

    def _handle(self, event: Event, now: float) -> None:
        match event:
            case Arrived(route=route, message=message):
                self._on_message(route, message, now)
            case StepDone(future=future, ended_at=ended_at):
                self._on_step_done(future, ended_at, now)
            case GrammarCompiled(request=request, future=future):
                self._on_grammar(request, future, now)
            case VisitorSilent(visitor=visitor):
                self._on_silence(visitor, now)
            case Drain():
                self._begin_drain(now)
            case DoorDied(error=error) | MoverDied(error=error):
                raise error
            case _:
                self._sending.on_mover_event(event, now)
                self._receiving.on_mover_event(event, now)

    def _tick(self, now: float) -> None:
        self._ticked_at = now
        self._door.set_load(self._load())
        self._sending.tick(now)
        self._receiving.tick(now)
        for id, request in self._outbox.overdue(now):
            self._end(id, Failed(code="deadline", message=f"not finished within {request.timeout_s:g} s"), now)
        if self._drain_deadline is not None and now > self._drain_deadline:
            for id in self._outbox.ids():
                self._end(id, Failed(code="draining", message="the node is shutting down"), now)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _begin_step(self, now: float) -> None:
        if now < self.core.pace.queue_at:
            return
        future = self.core.begin_step(now)
        if future is not None:
            future.add_done_callback(lambda done: self.inbox.put(StepDone(done, self._clock())))
        self._sending.on_scheduled(now)

    def _on_step_done(self, future: Future[ModelRunnerOutput], ended_at: float, now: float) -> None:
        results = self.core.finish_step(future, ended_at)
        error = future.exception()
        if error is not None and not isinstance(error, StepNotRun):
            log.error("a step failed and with it %d requests", len(results), exc_info=error)
        for result in results:
            self._on_result(result)
        if (step := self.core.pace.last) is not None:
            self._sending.observe_step(step.num_tokens, step.seconds)
        self._sending.on_results(results, now)

    def _on_result(self, result: StepResult) -> None:
        """Makes the output of what a step did for a request."""
        request = result.request
        if not result.new_token_ids and result.finish is None and result.prompt_logprobs is None:
            return
        open = self._outbox.get(request.request_id)
        if open is None:
            return
        position, token_ids, logprobs = result.position, result.new_token_ids, result.logprobs
        takeover = self._receiving.takeover(request)
        if takeover is not None:
            final = takeover.completed.final
            if takeover.position < position:
                token_ids = final.token_ids[takeover.position : position] + token_ids
                position = takeover.position
                if final.logprobs is not None:
                    logprobs = [*final.logprobs, *(logprobs or [])]
        computed_first = takeover is None and not open.has_output and bool(result.new_token_ids)
        open.has_output = open.has_output or bool(token_ids)
        self._outbox.put(
            RequestOutput(
                id=request.request_id,
                position=position,
                token_ids=token_ids,
                logprobs=logprobs,
                end=result.finish,
                prefill=request.prefill_proof() if computed_first else None,
                transfer=transfer_proof(takeover, request) if takeover is not None else None,
                prompt_logprobs=result.prompt_logprobs,
            )
        )

    # ---- messages --------------------------------------------------------------------------------------------------

    def _on_message(self, route: Route, message: object, now: float) -> None:
        match message:
            case PeerMessage():
                self._on_peer_message(route, message, now)
            case AddRequest():
                self._on_add(route, message, now)
            case AbortRequests(ids=ids):
                for id in ids:
                    open = self._outbox.get(id)
                    if open is not None and open.owner == route:
                        self._end(id, Aborted(), now)
            case Meet(peers=peers):
                for peer in peers:
                    self._sending.meet(peer, now)
                    self._receiving.meet(peer, now)
            case Retarget():
                self._on_retarget(route, message, now)
            case Hello():
                self._door.send(route, self.info)
            case GetTokenizer():
                self._door.send(route, self._tokenizer)
            case GetStatus():
                self._door.send(route, self._status())
            case ResetPrefixCache():
                forgotten, left = self.core.scheduler.reset_prefix_cache()
                self._door.send(route, PrefixCacheReset(blocks_forgotten=forgotten, blocks_left=left))

    def _on_peer_message(self, route: Route, message: PeerMessage, now: float) -> None:
        stale = stale_boot(self.info.identity.boot_id, message)
        if stale is not None:
            self._door.send(route, stale)
        elif message.to_boot != self.info.identity.boot_id:
            return
        elif message.from_sender and self._takes_over:
            self._receiving.on_peer_message(route, message, now)
        elif not message.from_sender and self._hands_over:
            self._sending.on_peer_message(message, now)

    def _on_add(self, route: Route, message: AddRequest, now: float) -> None:
        refusal = self._refusal(message)
        if refusal is None:
            try:
                request = self.core.add_request(
                    message, now, lambda request, future: self.inbox.put(GrammarCompiled(request, future))
                )
            except RequestRejected as error:
                refusal = (error.code, error.message)
        if refusal is not None:
            log.info("request %s (client %s) refused: %s", message.id, message.client_id, refusal[1])
            failed = Failed(code=refusal[0], message=refusal[1])
            self._outbox.refuse(route, RequestOutput(id=message.id, position=len(message.output_token_ids), end=failed))
            return
        deadline = now + message.timeout_s
        open = OpenRequest(route, deadline, message.timeout_s, len(message.prompt_token_ids))
        self._outbox.open(message.id, open)
        if message.send_to is not None:
            self._sending.accept(request, message.send_to)
        if message.receive_from is not None:
            self._receiving.accept(request, message.receive_from, now)

    def _on_grammar(self, request: Request, future: Future[GrammarMatcher], now: float) -> None:
        if request.status is RequestStatus.FINISHED:
            return
        try:
            self.core.grammar_compiled(request, future)
        except RequestRejected as error:
            self._end(request.request_id, Failed(code=error.code, message=error.message), now)

    def _on_retarget(self, route: Route, message: Retarget, now: float) -> None:
        """The half goes on under its new id; the old one has had its end."""
        open = self._outbox.get(message.id)
        held = self.core.scheduler.requests.get(message.id)
        failed = Failed(code="handoff", message=f"nothing is held for {message.id}")
        refusal = RequestOutput(id=message.new_id, position=0, end=failed)
        if open is None or held is None or open.owner != route or self._is_known(message.new_id):
            self._outbox.refuse(route, refusal)
            return
        # Before it goes on: its receiver may have cancelled it already.
        self._outbox.open(message.new_id, replace(open))
        if not self._sending.retarget(message.id, message.new_id, message.send_to, now):
            self._outbox.put(refusal)
            return
        self._outbox.put(RequestOutput(id=message.id, position=held.num_output_tokens, end=Aborted()))

    def _is_known(self, id: str) -> bool:
        """Whether a request of that id is open, or its hand-off, which may outlast it."""
        return self._outbox.get(id) is not None or self._sending.knows(id) or self._receiving.knows(id)

    def _refusal(self, message: AddRequest) -> tuple[ErrorCode, str] | None:
        """Why the request is not even given to the engine."""
        if message.boot_id != self.info.identity.boot_id:
            return "stale_boot", "the node has restarted"
        if self._is_known(message.id):
            return "bad_request", f"a request with id {message.id} is running"
        if self._drain_deadline is not None:
            return "draining", "the node is shutting down"
        if len(self._outbox) >= MAX_OPEN_REQUESTS:
            return "overloaded", f"the node has {MAX_OPEN_REQUESTS} requests"
        if self._outbox.num_prompt_tokens + len(message.prompt_token_ids) > MAX_OPEN_PROMPT_TOKENS:
            return "overloaded", f"the prompts of the node's requests have {MAX_OPEN_PROMPT_TOKENS} tokens"
        if message.send_to is not None and not self._hands_over:
            return "bad_request", f"a {self.info.identity.role} node does not hand over"
        if message.receive_from is not None and not self._takes_over:
            return "bad_request", f"a {self.info.identity.role} node does not take over"
        return None

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _end(self, id: str, end: Aborted | Failed, now: float) -> None:
        """Ends an open request of ours for a reason of ours."""
        if not isinstance(end, Aborted):
            log.warning("request %s failed: %s", id, end.message)
        request = self.core.abort(id, now, "aborted" if isinstance(end, Aborted) else "failed")
        reason = "aborted" if isinstance(end, Aborted) else end.message
        self._sending.abort(id, reason, now)
        self._receiving.abort(id, now)
        assert request is not None, f"{id} is open and not known to the scheduler"
        self._outbox.put(RequestOutput(id=id, position=request.num_output_tokens, end=end))

    def _on_silence(self, visitor: Visitor, now: float) -> None:
        ids = self._outbox.ids_of(visitor)
        if ids:
            log.warning("a router is silent; ending its %d requests", len(ids))
        for id in ids:
            self._end(id, Aborted(), now)

    def _flush(self) -> None:
        for route, outputs in self._outbox.take().items():
            self._door.send(route, Outputs(outputs=outputs))

    # ---- the end of the node ---------------------------------------------------------------------------------------

    def _begin_drain(self, now: float) -> None:
        if self._drain_deadline is None:
            log.info("draining: %d requests, %g s at most", len(self._outbox), self._drain_timeout_s)
            self._drain_deadline = now + self._drain_timeout_s
            self._door.set_load(self._load())
            self._door.broadcast_load()

    def _drained(self) -> bool:
        is_idle = not (self._outbox or self._heard or self.core.step_in_flight)
        return self._drain_deadline is not None and is_idle

    # ---- what we say of ourselves ----------------------------------------------------------------------------------

    def _load(self) -> NodeLoad:
        scheduler = self.core.scheduler
        usage = scheduler.usage()
        return NodeLoad(
            boot_id=self.info.identity.boot_id,
            draining=self._drain_deadline is not None,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + scheduler.num_waiting_for_kv,
            handoffs=self._sending.num_open + self._receiving.num_open,
            blocks_total=usage.total,
            blocks_free=usage.free,
            blocks_cached=usage.cached,
            blocks_held=usage.held,
            blocks_in_use=usage.in_use,
            links=self._sending.links(),
            prompt_tokens_per_s=scheduler.prompt_tokens_per_s,
        )

    def _status(self) -> NodeStatus:
        counters = self.core.counters.as_dict() | {
            "blocks_landed": self._receiving.blocks_landed,
            "bytes_landed": self._receiving.bytes_landed,
            "digest_mismatches": self._receiving.digest_mismatches,
            "blocks_resent": self._receiving.stats.total("blocks_resent"),
            "blocks_sent": self._sending.stats.total("blocks_sent"),
            "bytes_sent": self._sending.stats.total("bytes_sent"),
            "leases_expired": self._sending.stats.total("leases_expired")
            + self._receiving.stats.total("leases_expired"),
            "reserved_block_seconds": self._receiving.reserved.block_seconds(self._clock()),
            "landing_seconds": self._receiving.landing_s,
            "regions_abandoned": self._mover.regions_abandoned,
            "region_bytes_abandoned": self._mover.bytes_abandoned,
        }
        return NodeStatus(
            info=self.info,
            load=self._load(),
            uptime_s=self._clock() - self._started_at,
            counters=counters,
            peers=self._sending.peers() | self._receiving.peers(),
            peer_counters=merged(self._sending.stats, self._receiving.stats),
            histograms=self._sending.stats.histograms() | self._receiving.stats.histograms(),
            gauges={
                "blocks_reserved": self._receiving.reserved.now,
                "blocks_reserved_most": self._receiving.reserved.most,
                "blocks_landing": self._receiving.num_landing,
            }
            | (self._memory.gauges() if self._memory is not None else {}),
        )
