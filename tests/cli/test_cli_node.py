"""`pdserve node`: what it prints of a node, over a real door."""

from __future__ import annotations

import asyncio
import io
import json

import msgspec
import pytest
from pdserve_cli.main import main
from pdserve_cli.node import reset_cache, show_status
from pdserve_cli.node_view import status_json, status_view
from pdserve_protocol.door import Address
from pdserve_protocol.errors import NodeUnreachable
from pdserve_protocol.node import PrefixCacheReset
from rich.console import Console
from support.status_node import STATUS, status_node

ADDRESS = Address("127.0.0.1", 7002)


def _console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=120), out


def _shown(status: object = STATUS) -> list[list[str]]:
    """Rows of the tables as lists of cells."""
    console, out = _console()
    console.print(status_view(ADDRESS, status))  # type: ignore[arg-type]
    lines = out.getvalue().splitlines()
    return [
        [cell.strip() for cell in line.strip("│ ").split("│ ")] if "│" in line else [line.strip()] for line in lines
    ]


def test_blocks_add_up_and_everything_is_shown() -> None:
    rows = _shown()
    assert ["free", "50", "50.0 %"] in rows
    assert ["cached", "30", "30.0 %"] in rows
    assert ["held", "5", "5.0 %"] in rows
    assert ["in use", "15", "15.0 %"] in rows
    assert ["total", "100"] in rows
    assert ["2", "1", "3"] in rows
    assert ["generated tokens", "12,345"] in rows
    assert ["transfer s", "1.250"] in rows
    assert ["127.0.0.1:7001", "up"] in rows
    assert rows[0] == ["decode node 127.0.0.1:7002  smollm2, up 1 h 2 min"]


def test_blocks_that_do_not_add_up_are_said_to() -> None:
    load = msgspec.structs.replace(STATUS.load, blocks_free=49)
    rows = _shown(msgspec.structs.replace(STATUS, load=load))
    assert ["total", "100, but the parts are 99"] in rows


def test_draining_and_no_peers() -> None:
    load = msgspec.structs.replace(STATUS.load, draining=True)
    rows = _shown(msgspec.structs.replace(STATUS, load=load, peers={}))
    assert rows[0][0].endswith("draining")
    assert any(row == ["No peers"] for row in rows)


def test_json_holds_all() -> None:
    line = status_json(ADDRESS, STATUS)
    assert "\n" not in line
    value = json.loads(line)
    assert value["address"] == "127.0.0.1:7002"
    assert value["load"]["blocks_in_use"] == 15
    assert value["identity"]["layout"]["block_bytes"] == 368640
    assert value["counters"] == {"generated_tokens": 12345, "transfer_s": 1.25}


@pytest.mark.parametrize("key", [None, "hunter2"])
def test_status_over_a_door(key: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> int:
        async with status_node(cluster_key=key) as port:
            address = Address("127.0.0.1", port)
            return await show_status(
                [address, address], cluster_key=key, timeout=5, as_json=True, console=_console()[0]
            )

    assert asyncio.run(run()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["model"] for line in lines] == ["smollm2", "smollm2"]


@pytest.mark.slow
def test_a_wrong_cluster_key_gets_no_answer() -> None:
    async def run() -> None:
        async with status_node(cluster_key="hunter2") as port:
            with pytest.raises(NodeUnreachable, match="--cluster-key"):
                await show_status(
                    [Address("127.0.0.1", port)],
                    cluster_key="hunter3",
                    timeout=0.5,
                    as_json=True,
                    console=_console()[0],
                )

    asyncio.run(run())


@pytest.mark.parametrize(("left", "code"), [(0, 0), (2, 1)])
def test_reset_cache(left: int, code: int) -> None:
    console, out = _console()

    async def run() -> int:
        async with status_node(reset=PrefixCacheReset(blocks_forgotten=30, blocks_left=left)) as port:
            return await reset_cache([Address("127.0.0.1", port)], cluster_key=None, timeout=5, console=console)

    assert asyncio.run(run()) == code
    assert "30 blocks forgotten" in out.getvalue()
    assert ("2 blocks left" in out.getvalue()) == bool(left)


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["node", "status", "127.0.0.1:1", "--timeout", "0.1"])
    assert exit.value.code == 1
    assert "no answer from 127.0.0.1:1 within 0.1 s" in capsys.readouterr().err
