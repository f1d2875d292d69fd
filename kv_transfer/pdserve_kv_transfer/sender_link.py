"""The sender's end of a link: introduces itself, connects to the peer's region, then carries the Sender's hand-offs."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from pdserve_protocol.handoff import (
    Cancel,
    Done,
    Gone,
    Grant,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    Refuse,
    Resend,
    StaleBoot,
    State,
)
from pdserve_protocol.node import mismatch

from pdserve_kv_transfer.connector import MAX_SLOTS
from pdserve_kv_transfer.deadlines import Deadlines
from pdserve_kv_transfer.effects import BreakLink, Connect, LinkLost, Send
from pdserve_kv_transfer.link import Heartbeat
from pdserve_kv_transfer.sender import Sender
from pdserve_kv_transfer.wire import agree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve_protocol.handoff import Final, PeerMessage
    from pdserve_protocol.node import NodeIdentity

    from pdserve_kv_transfer.effects import Effect


class LinkState(enum.Enum):
    """CONNECTING: offers wait. UP: hand-offs run. LOST: for good; a new link takes a higher number."""

    CONNECTING = enum.auto()
    UP = enum.auto()
    LOST = enum.auto()


class SenderLink:
    """From this process to the peer's process, once. The verbs are Sender's; offers made before the link is up wait.

    ``number`` is higher than that of any earlier link from this process to that one.
    """

    def __init__(
        self, identity: NodeIdentity, peer_boot: str, *, number: int = 1, deadlines: Deadlines | None = None
    ) -> None:
        self.identity = identity
        self.peer_boot = peer_boot
        self.state = LinkState.CONNECTING
        self.mismatch: str | None = None
        self._deadlines = deadlines or Deadlines()
        self._number = number
        self._sender = Sender(block_size=identity.layout.block_size, deadlines=self._deadlines)
        self._heartbeat = Heartbeat(identity, peer_boot, is_sender=True, deadlines=self._deadlines)
        self._opened_at = 0.0
        self._hello_at = 0.0
        self._welcomed = False

    @property
    def open_ids(self) -> list[str]:
        """Ids that have not ended for the engine yet; a lost link is kept until there are none."""
        return self._sender.open_ids

    # The life of the link.

    def open(self, now: float) -> list[Effect]:
        """Introduces this process. LinkLost follows if the link is not up within the connect deadline."""
        self._opened_at = now
        self._heartbeat.restart(self._number, now)
        return self._hello(now)

    def connected(self, now: float) -> list[Effect]:
        """The mover can write into the region."""
        if self.state is not LinkState.CONNECTING or not self._welcomed:
            return []
        self.state = LinkState.UP
        self._heartbeat.heard(now)
        return [self._heartbeat.state(self._sender.describe(), now)]

    def connect_failed(self, reason: str, now: float) -> list[Effect]:
        """The mover cannot connect to the region."""
        return self._lose(f"cannot connect to the landing region: {reason}", now)

    def on_peer_message(self, message: PeerMessage, now: float) -> list[Effect]:
        """A message of the receiver's end. One of another link, or after the end, says nothing."""
        if message.link != self._number or message.from_sender or self.state is LinkState.LOST:
            return []
        self._heartbeat.heard(now)
        match message.body:
            case LinkWelcome():
                return self._on_welcome(message.body, now)
            case LinkRefused(reason=reason, mismatch=is_mismatch):
                if is_mismatch:
                    self.mismatch = reason
                return self._lose(f"the receiver refused the link: {reason}", now)
            case StaleBoot():
                return self._lose("the receiver has restarted", now)
            case State():
                return self._on_state(message.body, now)
            case Grant() | Refuse() | Resend() | Done() | Cancel() | Gone():
                return self._out(self._sender.on_message(message.body, now), now)
            case _:
                return []

    def peer_restarted(self, now: float) -> list[Effect]:
        """The receiver's process is known to be dead: another one is in its place."""
        return self._lose("the receiver has restarted", now)

    def tick(self, now: float) -> list[Effect]:
        """Lets time pass: States, deadlines, silence."""
        if self._heartbeat.slept(now) or self.state is LinkState.LOST:
            return []
        effects = self._out(self._sender.tick(now), now)
        if self.state is LinkState.CONNECTING:
            if now - self._opened_at > self._deadlines.connect_s:
                effects += self._lose(f"the receiver has not welcomed us in {self._deadlines.connect_s:g} s", now)
            elif now >= self._hello_at:
                effects += self._hello(now)
        elif self._heartbeat.silent(now):
            effects += self._lose(f"the receiver is silent for {self._deadlines.dead_after_s:g} s", now, silent=True)
        elif self.state is LinkState.UP and now >= self._heartbeat.due_at:
            effects.append(self._heartbeat.state(self._sender.describe(), now))
        return effects

    # The verbs of Sender.

    def offer(self, id: str, num_tokens: int, eta_s: float, now: float) -> list[Effect]:
        effects = self._out(self._sender.offer(id, num_tokens, eta_s, now), now)
        if self.state is LinkState.LOST:
            effects += self._sender.link_lost("the link is lost", now)
        return effects

    def ready(self, id: str, positions: Iterable[int], now: float) -> list[Effect]:
        return self._out(self._sender.ready(id, positions, now), now)

    def finish(self, id: str, final: Final, now: float) -> list[Effect]:
        return self._out(self._sender.finish(id, final, now), now)

    def reopen(self, id: str, positions: Iterable[int]) -> None:
        self._sender.reopen(id, positions)

    def unpinned(self, id: str) -> None:
        self._sender.unpinned(id)

    def not_needed(self, id: str, now: float) -> list[Effect]:
        return self._out(self._sender.not_needed(id, now), now)

    def abort(self, id: str, reason: str, now: float) -> list[Effect]:
        return self._out(self._sender.abort(id, reason, now), now)

    def on_written(self, id: str, digests: Mapping[int, bytes], now: float) -> list[Effect]:
        return self._out(self._sender.on_written(id, digests, now), now)

    def on_write_failed(self, id: str, positions: Iterable[int], reason: str, now: float) -> list[Effect]:
        return self._out(self._sender.on_write_failed(id, positions, reason, now), now)

    # Inside.

    def _hello(self, now: float) -> list[Effect]:
        self._hello_at = now + self._deadlines.state_interval_s
        return [self._heartbeat.transmit(LinkHello(identity=self.identity))]

    def _on_welcome(self, welcome: LinkWelcome, now: float) -> list[Effect]:
        if self._welcomed:
            return []
        fault = mismatch(self.identity, welcome.identity)
        if fault is None and welcome.connector not in self.identity.connectors:
            fault = f"there is no KV connector {welcome.connector!r} here"
        if fault is not None:
            self.mismatch = fault
            return self._lose(fault, now)
        wire = agree(self.identity, welcome.identity)
        if welcome.region.slot_bytes != wire.slot_bytes:
            return self._lose(f"slots of {welcome.region.slot_bytes} bytes for blocks of {wire.slot_bytes}", now)
        if not 0 < welcome.region.num_slots <= MAX_SLOTS:
            return self._lose(f"a region of {welcome.region.num_slots} slots", now)
        self._welcomed = True
        self._sender.set_region(welcome.region)
        return [Connect(welcome.connector, welcome.region, wire)]

    def _on_state(self, state: State, now: float) -> list[Effect]:
        taken = self._heartbeat.take(state)
        if taken is None:
            return []
        entries, ended = taken
        effects: list[Effect] = []
        for entry in entries:
            if isinstance(entry, Grant | Refuse | Resend | Done | Cancel | Gone):
                effects += self._sender.on_message(entry, now)
        for id in ended:
            effects += self._sender.on_message(Gone(id=id), now)
        return self._out(effects, now)

    def _out(self, effects: list[Effect], now: float) -> list[Effect]:
        """The Sender's effects as the link's: sends go out only while the link is up, State repeats them once it is."""
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(body=body):
                    if self.state is LinkState.UP:
                        out.append(self._heartbeat.transmit(body))
                case BreakLink(reason=reason):
                    out += self._lose(reason, now)
                case _:
                    out.append(effect)
        return out

    def _lose(self, reason: str, now: float, *, silent: bool = False) -> list[Effect]:
        if self.state is LinkState.LOST:
            return []
        self.state = LinkState.LOST
        return [LinkLost(reason, silent), *self._out(self._sender.link_lost(reason, now), now)]
