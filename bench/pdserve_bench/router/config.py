"""What `pdserve bench router` is asked for, and the loads that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RouterBench:
    """One run.

    Attributes:
        model: whose tokenizer is used.
        router_core: the router's; None takes the first that this process may use.
        concurrency: connections, each with a request under way at any time.
        output_len: tokens of a stream.
        step_ms: of the paced nodes.
        seconds: of each phase.
        label: names the run in its record.
    """

    model: str
    router_core: int | None
    concurrency: int
    output_len: int
    step_ms: float
    seconds: float
    label: str
    json_path: Path | None


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One load.

    Attributes:
        step_ms: time between two tokens of a stream; 0 is at once.
        prompt_tokens: about so many, sent as text.
    """

    name: str
    step_ms: float
    prompt_tokens: int
    output_len: int
    stream: bool


def phases(bench: RouterBench) -> list[Phase]:
    """The streams of ``at once`` come in few messages with many tokens; those of ``paced`` in a message a step."""
    return [
        Phase(name="streams, at once", step_ms=0.0, prompt_tokens=16, output_len=bench.output_len, stream=True),
        Phase(
            name=f"streams, a token every {bench.step_ms:g} ms",
            step_ms=bench.step_ms,
            prompt_tokens=16,
            output_len=bench.output_len,
            stream=True,
        ),
        Phase(name="plain, 16 tokens", step_ms=0.0, prompt_tokens=16, output_len=16, stream=False),
        Phase(name="streams of 2 tokens, 512 in", step_ms=0.0, prompt_tokens=512, output_len=2, stream=True),
    ]
