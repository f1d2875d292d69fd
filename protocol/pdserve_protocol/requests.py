"""What a router asks of a node."""

from __future__ import annotations

from pdserve_protocol.codec import Message, Record
from pdserve_protocol.sampling import SamplingParams

MAX_OPEN_PROMPT_TOKENS = 4 << 20
"""Of all requests that a node has at the same time, where each choice counts its prompt."""


class SendTo(Record, frozen=True):
    """This half computes the prompt and hands its KV to the node at ``host:port`` whose boot id is given."""

    host: str
    port: int
    boot_id: str


class ReceiveFrom(Record, frozen=True):
    """This half waits for the KV of its prompt from the node with this boot id."""

    boot_id: str


class AddRequest(Message, frozen=True):
    """One half of a request, or a whole one (neither ``send_to`` nor ``receive_from``).

    Attributes:
        id: fresh for each attempt, the same on both halves, never the client's.
        boot_id: of the node meant; another one answers Failed(stale_boot).
        prompt_token_ids: the prompt, >= 1 token.
        output_token_ids: tokens the client has already seen; they are a forced prefix and are not sampled again.
        timeout_s: seconds from arrival until the node gives up.
        choice: index of the choice; part of the counter of the random numbers.
        client_id: the client's own id, for log lines only.
        cache_salt: prefix cache hits are shared only between requests with the same salt.
        priority: lower ones are computed earlier, and preempted later.
    """

    id: str
    boot_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []
    timeout_s: float = 600.0
    send_to: SendTo | None = None
    receive_from: ReceiveFrom | None = None
    choice: int = 0
    client_id: str = ""
    cache_salt: str = ""
    priority: int = 0


class AbortRequests(Message, frozen=True):
    """End these requests now; each still answers with its one terminal output (aborted)."""

    ids: list[str]
