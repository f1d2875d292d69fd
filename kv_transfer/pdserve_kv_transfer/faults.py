"""What shall go wrong, as text and as a value: ``seed=7&corrupt=0.01&delay_ms=5``. For tests and drills."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from urllib.parse import parse_qsl

from pdserve_kv_transfer.errors import BadConnectorSpec

_NOT_SHARES = ("seed", "delay_ms", "late_ms")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Shares are between 0 and 1. The same seed gives the same faults to the same writes and messages.

    Of KV writes:

    Attributes:
        delay_ms: each starts up to so much later.
        drop: share of blocks that are never written, although the write ends well.
        corrupt: share of blocks in whose place another one is written.
        double: share of writes that are made again after their end, when their slots may have other uses.
        reorder: share of writes that wait until a later one has started, or 50 ms.
        stall: share of writes that never end.
        fail: share of writes that end with an error.

    Of messages to other nodes:

    Attributes:
        lose: share that is never sent.
        repeat: share that is sent twice.
        late_ms: each is sent up to so much later, and so not in order.
    """

    seed: int = 0
    delay_ms: float = 0.0
    drop: float = 0.0
    corrupt: float = 0.0
    double: float = 0.0
    reorder: float = 0.0
    stall: float = 0.0
    fail: float = 0.0
    lose: float = 0.0
    repeat: float = 0.0
    late_ms: float = 0.0

    @property
    def of_messages(self) -> bool:
        """Whether any message would be touched."""
        return bool(self.lose or self.repeat or self.late_ms)

    def __str__(self) -> str:
        return "&".join(f"{key}={value:g}" for key, value in dataclasses.asdict(self).items() if value)


def parse_faults(text: str) -> Faults:
    """Reads ``name=value&...``; all names are Faults' attributes.

    Raises:
        BadConnectorSpec: another name, or a value that cannot be.
    """
    names = [one.name for one in dataclasses.fields(Faults)]
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
        values = {name: int(value) if name == "seed" else float(value) for name, value in pairs}
    except ValueError as error:
        raise BadConnectorSpec(text, str(error)) from error
    for name, value in values.items():
        if name not in names:
            raise BadConnectorSpec(text, f"{name!r} is none of {', '.join(names)}")
        highest = 1.0 if name not in _NOT_SHARES else 1e9
        if not 0 <= value <= highest:
            raise BadConnectorSpec(text, f"{name} is not between 0 and {highest:g}")
    return Faults(**values)  # type: ignore[arg-type]
