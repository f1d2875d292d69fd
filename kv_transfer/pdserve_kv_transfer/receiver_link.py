"""The receiver's end of a link: decides whether a sender may write here, and gives it a region of its own."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from pdserve_protocol.handoff import (
    Gone,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    NotNeeded,
    Offer,
    Sent,
    StaleBoot,
    State,
    Stopped,
    Stopping,
)
from pdserve_protocol.node import mismatch

from pdserve_kv_transfer.deadlines import Deadlines
from pdserve_kv_transfer.effects import BreakLink, FenceRegion, LinkLost, NeedRegion, Send
from pdserve_kv_transfer.link import Heartbeat
from pdserve_kv_transfer.receiver import Receiver
from pdserve_kv_transfer.wire import agree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve_protocol.handoff import PeerMessage, Region
    from pdserve_protocol.node import NodeIdentity

    from pdserve_kv_transfer.effects import Effect
    from pdserve_kv_transfer.receiver import GrantPolicy
    from pdserve_kv_transfer.wire import Wire


class ReceiverLinkState(enum.Enum):
    """IDLE: no sender has spoken, or the last link is lost. OPENING: the region is being made. UP: hand-offs run."""

    IDLE = enum.auto()
    OPENING = enum.auto()
    UP = enum.auto()


class ReceiverLink:
    """To this process from the peer's process, over any number of links one after the other.

    The verbs are Receiver's; they may be used from the start, also before the peer has spoken.

    Attributes:
        wire: what travels, once the peer has spoken.
        exact: what lands is bit for bit what this node would have computed.
        origin: where it is not, a name of what computed and carried it.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        peer_boot: str,
        *,
        deadlines: Deadlines | None = None,
        grant_policy: GrantPolicy = "offer",
    ) -> None:
        self.identity = identity
        self.peer_boot = peer_boot
        self.state = ReceiverLinkState.IDLE
        self.connector: str | None = None
        self.exact = False
        self.origin = ""
        self.wire: Wire | None = None
        self._deadlines = deadlines or Deadlines()
        self._receiver = Receiver(deadlines=self._deadlines, grant_policy=grant_policy)
        self._heartbeat = Heartbeat(identity, peer_boot, is_sender=False, deadlines=self._deadlines)
        self._region: Region | None = None
        self._sender: NodeIdentity | None = None

    @property
    def number(self) -> int:
        """Of the link that the peer has begun last; 0 before any."""
        return self._heartbeat.link

    @property
    def open_ids(self) -> list[str]:
        """Expected ids that have not ended for the engine yet."""
        return self._receiver.open_ids

    # The life of the link.

    def region_ready(self, region: Region, now: float) -> list[Effect]:
        """The region that NeedRegion asked for."""
        if self.state is not ReceiverLinkState.OPENING:
            return []
        self.state = ReceiverLinkState.UP
        self._region = region
        self._receiver.set_region(region)
        self._heartbeat.restart(self._heartbeat.link, now)
        return self._welcome()

    def region_failed(self, reason: str, now: float) -> list[Effect]:
        """There can be no region."""
        if self.state is not ReceiverLinkState.OPENING:
            return []
        self.state = ReceiverLinkState.IDLE
        return [self._heartbeat.transmit(LinkRefused(reason=f"no landing region: {reason}"))]

    def on_peer_message(self, message: PeerMessage, now: float) -> list[Effect]:
        """A message of the sender's end. One of an older link says nothing."""
        if not message.from_sender or message.link < self._heartbeat.link:
            return []
        if isinstance(message.body, LinkHello):
            return self._on_hello(message.body, message.link, now)
        if message.link != self._heartbeat.link:
            return []
        if isinstance(message.body, StaleBoot):
            return self._lose("the sender has restarted", now, peer_lives=False)
        if self.state is ReceiverLinkState.IDLE:
            return [self._heartbeat.transmit(LinkRefused(reason="this link is lost"))]
        if self.state is ReceiverLinkState.OPENING:
            return []
        self._heartbeat.heard(now)
        match message.body:
            case State():
                return self._on_state(message.body, now)
            case Offer() | Sent() | NotNeeded() | Stopping() | Stopped() | Gone():
                return self._out(self._receiver.on_message(message.body, now), now)
            case _:
                return []

    def peer_restarted(self, now: float) -> list[Effect]:
        """The sender's process is known to be dead: another one is in its place."""
        return self._lose("the sender has restarted", now, peer_lives=False)

    def tick(self, now: float) -> list[Effect]:
        """Lets time pass: States, deadlines, silence. A sender that is silent here may live, and begin another link."""
        if self._heartbeat.slept(now):
            return []
        effects = self._out(self._receiver.tick(now), now)
        if self.state is not ReceiverLinkState.UP:
            return effects
        if self._heartbeat.silent(now):
            reason = f"the sender is silent for {self._deadlines.dead_after_s:g} s"
            return effects + self._lose(reason, now, peer_lives=True, silent=True)
        if now >= self._heartbeat.due_at:
            effects.append(self._heartbeat.state(self._receiver.describe(), now))
        return effects

    # The verbs of Receiver.

    def expect(self, id: str, num_tokens: int, now: float) -> list[Effect]:
        return self._out(self._receiver.expect(id, num_tokens, now), now)

    def grant(self, id: str, needed: Sequence[int], now: float) -> list[Effect]:
        return self._out(self._receiver.grant(id, needed, now), now)

    def refuse(self, id: str, reason: str, now: float) -> list[Effect]:
        return self._out(self._receiver.refuse(id, reason, now), now)

    def cancel(self, id: str, now: float) -> list[Effect]:
        return self._out(self._receiver.cancel(id, now), now)

    def on_landed(self, id: str, ok: Iterable[int], bad: Iterable[int], now: float) -> list[Effect]:
        return self._out(self._receiver.on_landed(id, ok, bad, now), now)

    # Inside.

    def _on_hello(self, hello: LinkHello, link: int, now: float) -> list[Effect]:
        if link == self._heartbeat.link:
            self._heartbeat.heard(now)
            return self._welcome() if self.state is ReceiverLinkState.UP else []
        effects = self._lose("the sender has begun a new link", now, peer_lives=True)
        self._heartbeat.restart(link, now)
        fault = mismatch(self.identity, hello.identity)
        self._sender = self._sender or hello.identity
        if hello.identity != self._sender:
            fault = "a process that keeps its boot id has changed"
        if fault is not None:
            return [*effects, self._heartbeat.transmit(LinkRefused(reason=fault, mismatch=True))]
        self.wire = wire = agree(hello.identity, self.identity)
        same_numerics = self.identity.numerics == hello.identity.numerics
        self.exact = same_numerics and not wire.is_lossy
        self.origin = "" if self.exact else f"{hello.identity.numerics} as {wire.name}"
        self.connector = next(name for name in self.identity.connectors if name in hello.identity.connectors)
        if self.state is ReceiverLinkState.IDLE:
            self.state = ReceiverLinkState.OPENING
            effects.append(NeedRegion(self.connector, wire))
        return effects

    def _welcome(self) -> list[Effect]:
        if self._region is None or self.connector is None:
            return []
        welcome = LinkWelcome(identity=self.identity, connector=self.connector, exact=self.exact, region=self._region)
        return [self._heartbeat.transmit(welcome)]

    def _on_state(self, state: State, now: float) -> list[Effect]:
        taken = self._heartbeat.take(state)
        if taken is None:
            return []
        entries, ended = taken
        effects: list[Effect] = []
        for entry in entries:
            if isinstance(entry, Offer | Sent | NotNeeded | Stopping | Stopped | Gone):
                effects += self._receiver.on_message(entry, now)
        for id in ended:
            effects += self._receiver.on_message(Gone(id=id), now)
        return self._out(effects, now)

    def _out(self, effects: list[Effect], now: float) -> list[Effect]:
        """The Receiver's effects as the link's: sends go out only while the link is up."""
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case Send(body=body):
                    if self.state is ReceiverLinkState.UP:
                        out.append(self._heartbeat.transmit(body))
                case BreakLink(reason=reason):
                    out += self._lose(reason, now, peer_lives=True)
                case _:
                    out.append(effect)
        return out

    def _lose(self, reason: str, now: float, *, peer_lives: bool, silent: bool = False) -> list[Effect]:
        if self.state is not ReceiverLinkState.UP:
            return []
        self.state = ReceiverLinkState.IDLE
        self._region = None
        refused = self._heartbeat.transmit(LinkRefused(reason=reason))
        ended = self._out(self._receiver.link_lost(reason, now, peer_lives=peer_lives), now)
        return [FenceRegion(reason), refused, LinkLost(reason, silent), *ended]
