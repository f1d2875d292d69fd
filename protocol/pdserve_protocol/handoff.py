"""What two nodes say about KV hand-offs.

The node that has the KV opens a link to the node that wants it and is the sender on it. Every message names both boot
ids; one for a dead process is answered StaleBoot. Any message may be lost, late, doubled or reordered: each one says
how things stand, not what changed, so that saying it again is harmless, and State says all of them again every 0.5 s.

Positions are token positions of the first token of a KV block, from the start of the prompt.
"""

from __future__ import annotations

from pdserve_protocol.codec import Message, Record
from pdserve_protocol.node import NodeIdentity
from pdserve_protocol.outputs import TokenLogprobs
from pdserve_protocol.requests import SendTo


class Region(Record, frozen=True):
    """A receiver's landing region as the sender needs it.

    ``metadata`` is opaque to all but the connector; ``name`` changes whenever the region is replaced.
    """

    name: str
    num_slots: int
    slot_bytes: int
    metadata: bytes


class LinkHello(Record, frozen=True, tag=True):
    """Sender: may I write to you?"""

    identity: NodeIdentity


class LinkWelcome(Record, frozen=True, tag=True):
    """Receiver: yes, into this region. ``exact``: the numerics fingerprints agree."""

    identity: NodeIdentity
    connector: str
    exact: bool
    region: Region


class LinkRefused(Record, frozen=True, tag=True):
    """Receiver: not over this link; with ``mismatch`` never, because of this difference."""

    reason: str
    mismatch: bool = False


class Offer(Record, frozen=True, tag=True):
    """Sender: I have (``finished``) or soon will have the KV of this prompt."""

    id: str
    num_tokens: int
    eta_s: float
    finished: bool = False


class Grant(Record, frozen=True, tag=True):
    """Receiver: cache blocks for the whole prompt are reserved; I need these positions.

    ``slots`` (position -> slot of the region) are those that may be written now or were written before; it grows as
    slots come free.
    """

    id: str
    region: str
    needed: list[int]
    slots: dict[int, int]


class Refuse(Record, frozen=True, tag=True):
    """Receiver: I will not take it."""

    id: str
    reason: str


class Final(Record, frozen=True):
    """What the receiver needs beside KV to go on: all tokens so far. Counter-based sampling has no other state."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


class Sent(Record, frozen=True, tag=True):
    """Sender: the writes of these positions have ended; position -> digest of the block. ``final`` in the last one.

    ``tries``: of positions that were written again, how often; an older Sent tells of an older write.
    """

    id: str
    digests: dict[int, bytes]
    final: Final | None = None
    tries: dict[int, int] = {}


class NotNeeded(Record, frozen=True, tag=True):
    """Sender: the output ended with the first token; nothing follows and nothing is being written."""

    id: str


class Done(Record, frozen=True, tag=True):
    """Receiver: I have all I need; you may release your blocks."""

    id: str


class Resend(Record, frozen=True, tag=True):
    """Receiver: what arrived at these positions is not what was sent; write them again into the same slots.

    ``tries``: position -> which try is wanted, 1 for the first after the write that failed.
    """

    id: str
    tries: dict[int, int]


class Cancel(Record, frozen=True, tag=True):
    """Receiver: stop writing, and say when you have."""

    id: str


class Stopped(Record, frozen=True, tag=True):
    """Sender: this hand-off is over before its end and none of its writes is under way."""

    id: str
    reason: str


class Stopping(Record, frozen=True, tag=True):
    """Sender: this hand-off is over, and a write of it is still under way; Stopped, NotNeeded or Gone follows."""

    id: str


class Gone(Record, frozen=True, tag=True):
    """Answer about an id that is not known (any more); nothing of it is being written."""

    id: str


SenderSays = Offer | Sent | NotNeeded | Stopping | Stopped | Gone
ReceiverSays = Grant | Refuse | Resend | Done | Cancel | Gone


class State(Record, frozen=True, tag=True):
    """Every open hand-off of this link, as its side would describe it now.

    Attributes:
        number: rises by one with each State; an older one is dropped.
        last_seen: number of the last State seen from the other side.
        entries: one or more messages per open id.
        ids: all open ids, also those about which there is nothing to say yet. An id that is missing counts as ended
            only if ``last_seen`` shows that the other side knew of it.
    """

    number: int
    last_seen: int
    ids: list[str]
    entries: list[Offer | Sent | NotNeeded | Stopping | Stopped | Gone | Grant | Refuse | Resend | Done | Cancel]


class StaleBoot(Record, frozen=True, tag=True):
    """There is no process with the boot id that you named; here is ``boot_id``."""

    boot_id: str


PeerBody = (
    LinkHello
    | LinkWelcome
    | LinkRefused
    | Offer
    | Grant
    | Refuse
    | Sent
    | Resend
    | NotNeeded
    | Done
    | Cancel
    | Stopping
    | Stopped
    | Gone
    | State
    | StaleBoot
)


class PeerMessage(Message, frozen=True):
    """Envelope between two nodes. ``to_boot`` is the process meant, ``from_boot`` the one that speaks.

    ``from_sender`` tells on which of the two possible links between the nodes this is: the one whose sender speaks, or
    the one whose receiver speaks. ``link`` tells the links of one sender to one process apart; it rises with each.
    """

    from_boot: str
    to_boot: str
    from_sender: bool
    body: PeerBody
    link: int = 0


class Meet(Message, frozen=True):
    """Router: these nodes work with you. A node that hands over opens its links, so that no request has to wait.

    A node with another boot id than before at the same address has taken the place of a dead one.
    """

    peers: list[SendTo]


class Retarget(Message, frozen=True):
    """Router: what is held for hand-off ``id`` goes to ``send_to`` instead, as ``new_id``.

    The half ``id`` ends aborted and ``new_id`` goes on from its tokens; if nothing is held, ``new_id`` fails.
    """

    id: str
    new_id: str
    send_to: SendTo
