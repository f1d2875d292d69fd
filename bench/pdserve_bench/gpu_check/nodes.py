"""Node processes for the check, and requests to them: what a router does, without HTTP and text."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
import uuid
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from pdserve_protocol.client import EngineCoreClient
from pdserve_protocol.door import Address
from pdserve_protocol.node import GetStatus
from pdserve_protocol.outputs import Finished, HandedOver
from pdserve_protocol.requests import AddRequest, ReceiveFrom, SendTo
from pdserve_protocol.sampling import SamplingParams

from pdserve_bench.errors import NodeFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve_protocol.outputs import End, RequestOutput, TransferProof

START_S = 180.0
"""Loading, compiling kernels and capturing graphs."""

STOP_S = 15.0
_ROOMS = ("protocol", "text", "kernels", "kv_transfer", "engine", "prefill_node", "decode_node", "bench")


@contextmanager
def running_node(role: str, folder: Path, arguments: Sequence[str]) -> Iterator[Address]:
    """A node of ``role`` (prefill or decode) on this machine, ready; its log lies in ``folder``.

    Raises:
        NodeFailed: it is not ready in time.
    """
    command = [sys.executable, "-m", f"pdserve_{role}_node.main", "--port", "0", *arguments]
    log = folder / f"{role}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=_environment(folder))
    assert process.stdout is not None
    too_late = threading.Timer(START_S, process.kill)
    too_late.start()
    try:
        line = process.stdout.readline()
        too_late.cancel()
        port = re.search(r":(\d+) ", line)
        if port is None:
            raise NodeFailed(role, log.read_text()[-4000:])
        yield Address("127.0.0.1", int(port[1]))
    finally:
        too_late.cancel()
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _environment(folder: Path) -> dict[str, str]:
    """This process's, with the rooms of this checkout, and a version where pdserve is not installed."""
    root = Path(__file__).parents[3]
    paths = [str(root / room) for room in _ROOMS]
    try:
        version("pdserve")
    except PackageNotFoundError:
        number = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
        metadata = folder / f"pdserve-{number}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pdserve\nVersion: {number}\n")
        paths.append(str(folder))
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])])}


@dataclass(slots=True)
class Answer:
    """``tokens`` by output position; the same position said twice must be the same token."""

    tokens: dict[int, int] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    transfer: TransferProof | None = None
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def output(self) -> list[int]:
        return [self.tokens[position] for position in sorted(self.tokens)]


class Pair:
    """A prefill node and a decode node, connected. An async context manager."""

    def __init__(self, prefill: Address, decode: Address) -> None:
        self._prefill = EngineCoreClient(prefill, on_outputs=self._on_outputs)
        self._decode = EngineCoreClient(decode, on_outputs=self._on_outputs)
        self._decode_address = decode
        self._answers: defaultdict[str, Answer] = defaultdict(Answer)
        self._done: dict[str, asyncio.Event] = {}

    async def __aenter__(self) -> Pair:
        for client in (self._prefill, self._decode):
            await client.start()
            await client.ask(GetStatus())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._prefill.close()
        await self._decode.close()

    async def generate(
        self, prompt: list[int], num_tokens: int, *, disaggregated: bool, timeout_s: float = 60.0
    ) -> Answer:
        """Greedy tokens. Nothing is shared with an earlier request, not even the prefix cache.

        Raises:
            NodeFailed: a half ended badly, or not in time.
        """
        id, salt = uuid.uuid4().hex, uuid.uuid4().hex
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prefill, decode = self._prefill.info, self._decode.info
        if prefill is None or decode is None:
            raise NodeFailed("prefill" if prefill is None else "decode", "it is not there any more")
        answer, self._done[id] = self._answers[id], asyncio.Event()
        answer.started_at = time.perf_counter()
        prefill_boot, decode_boot = prefill.identity.boot_id, decode.identity.boot_id
        request = AddRequest(
            id=id,
            boot_id=decode_boot,
            prompt_token_ids=prompt,
            sampling=sampling,
            timeout_s=timeout_s,
            receive_from=ReceiveFrom(prefill_boot) if disaggregated else None,
            cache_salt=salt,
        )
        if disaggregated:
            send_to = SendTo(self._decode_address.host, self._decode_address.port, decode_boot)
            self._prefill.send(replace(request, boot_id=prefill_boot, send_to=send_to, receive_from=None))
        self._decode.send(request)
        try:
            async with asyncio.timeout(timeout_s):
                await self._done[id].wait()
        except TimeoutError as error:
            raise NodeFailed("decode", f"no answer within {timeout_s:g} s") from error
        bad = [end for end in answer.ends if not isinstance(end, Finished | HandedOver)]
        if bad:
            raise NodeFailed("decode" if len(answer.ends) > 1 else "prefill", str(bad[0]))
        return answer

    def _on_outputs(self, client: EngineCoreClient, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            answer = self._answers[output.id]
            for position, token_id in enumerate(output.token_ids, output.position):
                if answer.tokens.setdefault(position, token_id) != token_id:
                    answer.tokens[position] = -1
            answer.transfer = output.transfer or answer.transfer
            if output.end is not None:
                answer.ends.append(output.end)
                if not isinstance(output.end, HandedOver):
                    answer.finished_at = time.perf_counter()
                    self._done[output.id].set()
