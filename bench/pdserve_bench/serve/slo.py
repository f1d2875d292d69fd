"""Service level objectives of one request, as `ttft:500ms,itl:50ms`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_bench.errors import BadOption
from pdserve_bench.serve.records import LATENCIES

if TYPE_CHECKING:
    from pdserve_bench.serve.records import Latency, RequestRecord

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_OBJECTIVE = re.compile(r"(?P<what>\w+):(?P<limit>\d+(\.\d+)?)(?P<unit>us|ms|s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One latency of a request is at most ``limit_s``; of gaps between tokens the 99th percentile counts."""

    what: Latency
    limit_s: float


def parse_slo(text: str) -> tuple[Objective, ...]:
    """The meaning of ``text``; empty text has no objectives.

    Raises:
        BadOption: it has none.
    """
    names: dict[str, Latency] = {name: name for name in LATENCIES}
    objectives = []
    for part in filter(None, text.split(",")):
        match = _OBJECTIVE.fullmatch(part.strip())
        if match is None or match["what"] not in names:
            raise BadOption("--slo", text, f"parts like ttft:500ms are expected, of {', '.join(names)}")
        objectives.append(Objective(what=names[match["what"]], limit_s=float(match["limit"]) * _UNITS[match["unit"]]))
    return tuple(objectives)


def keeps(record: RequestRecord, objectives: tuple[Objective, ...]) -> bool:
    """Whether a request was answered within every objective, those aside that it cannot miss (gaps, with one token)."""
    if record.error is not None:
        return False
    latencies = ((record.latency(objective.what), objective.limit_s) for objective in objectives)
    return all(latency is None or latency <= limit_s for latency, limit_s in latencies)
