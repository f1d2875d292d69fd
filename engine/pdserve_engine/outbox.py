"""Outbox: the requests that are open, and what is to be said of them to their routers.

Sees to it that every open request gets exactly one terminal output, and nothing after it. Knows nothing of sockets, of
steps or of what the outputs mean.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve_protocol.outputs import RequestOutput

    from pdserve_engine.door import Route


@dataclass(slots=True)
class OpenRequest:
    """A request that has not had its terminal output.

    Attributes:
        owner: who is told.
        deadline: time of the engine's clock until which it may take.
        has_output: some tokens were sent.
    """

    owner: Route
    deadline: float
    timeout_s: float
    num_prompt_tokens: int
    has_output: bool = False


class Outbox:
    """Filled by the engine loop, emptied once a turn.

    Attributes:
        num_prompt_tokens: of all open requests.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self._open: dict[str, OpenRequest] = {}
        self._outputs: defaultdict[Route, list[RequestOutput]] = defaultdict(list)

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._open)

    def open(self, request_id: str, request: OpenRequest) -> None:
        """From now on the request has an owner, who must hear of its end."""
        assert request_id not in self._open, f"{request_id} is open"
        self._open[request_id] = request
        self.num_prompt_tokens += request.num_prompt_tokens

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def ids(self) -> list[str]:
        return list(self._open)

    def ids_of(self, owner: Route) -> list[str]:
        return [request_id for request_id, request in self._open.items() if request.owner == owner]

    def overdue(self, now: float) -> list[tuple[str, OpenRequest]]:
        """Requests whose deadline has passed."""
        return [(request_id, request) for request_id, request in self._open.items() if request.deadline < now]

    def put(self, output: RequestOutput) -> None:
        """Queues an output of an open request, which a terminal one closes. Of any other request it is dropped."""
        request = self._open.get(output.id)
        if request is None:
            return
        self._outputs[request.owner].append(output)
        if output.end is not None:
            del self._open[output.id]
            self.num_prompt_tokens -= request.num_prompt_tokens

    def refuse(self, owner: Route, output: RequestOutput) -> None:
        """Queues the end of a request that was never open."""
        self._outputs[owner].append(output)

    def take(self) -> Mapping[Route, list[RequestOutput]]:
        """All that is queued, by who is to hear it, in order; it is no longer queued."""
        outputs, self._outputs = self._outputs, defaultdict(list)
        return outputs
