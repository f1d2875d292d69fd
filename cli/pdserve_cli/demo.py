"""``pdserve demo``: two prompts through three processes, with the proof that KV went from one to the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.panel import Panel

from pdserve_cli.args import DEMO_MODEL
from pdserve_cli.demo_prompt import LONG_PROMPT
from pdserve_cli.errors import DemoFailed
from pdserve_cli.fleet import Fleet
from pdserve_cli.openai_api import model_names, stream
from pdserve_cli.proof_view import faults, proof_table
from pdserve_cli.supervise import Interrupted, supervise
from pdserve_cli.terminal import LogLines

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from pdserve_cli.commands import FleetConfig
    from pdserve_cli.fleet import Member
    from pdserve_cli.openai_api import Answer

QUESTION = "What is the capital of Japan?"
EXPECTED = "The capital of Japan is Tokyo."
LONG_PROMPT_OUTPUT_TOKENS = 64
_PROMPT_TAIL_CHARS = 150


async def demo(config: FleetConfig, *, model: str, console: Console, log: Console) -> int:
    """Starts the three, asks, shows, stops the three; 0 when everything was as it must be.

    Args:
        model: as the nodes were told. The answer to the question is only known for the demo model.

    Raises:
        CliError: something was not.
    """
    started = time.monotonic()
    lines = LogLines(log)
    status = console.status("starting a prefill node and a decode node")

    def on_ready(member: Member) -> None:
        seconds = time.monotonic() - started
        detail = f" ({member.what})" if member.what else ""
        console.print(
            f"[green]ready[/] {member.name} on {member.where}{detail} after {seconds:.1f} s",
            highlight=False,
            soft_wrap=True,
        )

    fleet = Fleet(config, on_line=lines.show, on_ready=on_ready)

    async def work(fleet: Fleet) -> int:
        status.stop()
        name = (await model_names(fleet.url))[0]
        await _ask(fleet.url, name, console, known=model == DEMO_MODEL)
        await _continue(fleet.url, name, console)
        return 0

    def on_stopping() -> None:
        status.update("stopping all three")
        status.start()

    status.start()
    try:
        code = await supervise(fleet, work, on_stopping=on_stopping)
    except Interrupted as interrupted:
        return 128 + interrupted.number
    finally:
        status.stop()
    exits = await fleet.stop()
    if any(exits.values()):
        raise DemoFailed(f"not every process stopped as it should: {exits}")
    console.print(
        f"[bold green]passed[/]: prefill here, decode there, no token computed twice; "
        f"all three processes stopped after {time.monotonic() - started:.1f} s",
        highlight=False,
    )
    return code


async def _ask(url: str, model: str, console: Console, *, known: bool) -> None:
    console.rule("1  a question, at temperature 0", align="left")
    console.print(f"[bold]user[/]       {QUESTION}", highlight=False)
    console.print("[bold]assistant[/]  ", end="")
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 64}
    answer = await stream(url, "/v1/chat/completions", body, _writer(console))
    _check(answer, console)
    if known and answer.text.strip() != EXPECTED:
        raise DemoFailed(f"the answer is {answer.text!r}, not {EXPECTED!r}")


async def _continue(url: str, model: str, console: Console) -> None:
    console.rule(f"2  a long prompt, continued for {LONG_PROMPT_OUTPUT_TOKENS} tokens", align="left")
    console.print(f"[dim]... {LONG_PROMPT[-_PROMPT_TAIL_CHARS:].replace(chr(10), ' ')}[/]", end="", highlight=False)
    body = {
        "model": model,
        "prompt": LONG_PROMPT,
        "temperature": 0,
        "max_tokens": LONG_PROMPT_OUTPUT_TOKENS,
        "ignore_eos": True,
    }
    answer = await stream(url, "/v1/completions", body, _writer(console))
    _check(answer, console)
    if answer.num_output_tokens != LONG_PROMPT_OUTPUT_TOKENS:
        raise DemoFailed(f"{answer.num_output_tokens} tokens came, not {LONG_PROMPT_OUTPUT_TOKENS}")


def _writer(console: Console) -> Callable[[str], None]:
    def write(text: str) -> None:
        console.out(text, end="", highlight=False)
        console.file.flush()

    return write


def _check(answer: Answer, console: Console) -> None:
    """Shows the proof of an answer.

    Raises:
        DemoFailed: it proves something else.
    """
    console.print("\n")
    console.print(Panel(proof_table(answer), title="what happened to it", title_align="left", expand=False))
    if found := list(faults(answer.proof)):
        raise DemoFailed("; ".join(found))
