"""Which nodes take a request, from what they say of themselves."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from pdserve_protocol.node import KVLayout, NodeIdentity, NodeInfo, NodeLoad
from pdserve_router.backlog import Backlog
from pdserve_router.lifecycle import Half
from pdserve_router.metrics import RouterMetrics
from pdserve_router.placement import Placed, Placement
from pdserve_router.registry import Node, ServedModel

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve_protocol.node import Role

LAYOUT = KVLayout(block_size=16, num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_bytes=4096)

NO_LINKS: dict[str, str] = {}


def node(
    name: str,
    role: Role,
    *,
    running: int = 0,
    waiting: int = 0,
    numerics: str = "n",
    wire: str = "auto",
    links: dict[str, str] | None = NO_LINKS,
) -> Node:
    """``links`` None: it has not answered a ping yet."""
    identity = NodeIdentity(name, role, "m", "t", numerics, LAYOUT, "d", ["c"], kv_wire_dtype=wire)
    info = NodeInfo(identity, "model", 1, None, 4096, 1 << 20, 100, "fake", max_num_seqs=8)
    load = None
    if links is not None:
        load = NodeLoad(name, False, running, waiting, 0, 1000, 1000, 0, 0, 0, links=links)
    return Node(role, cast("Any", SimpleNamespace(address=name, info=info, load=load)))


class World:
    def __init__(self, prefill: Node, *decode: Node) -> None:
        self.served = ServedModel(
            name="model",
            model_id="m",
            prefill=[prefill],
            decode=decode,
            limit=4096,
            vocab_size=100,
            text=cast("Any", None),
        )
        self.metrics, self.backlog = RouterMetrics(), Backlog()
        self.placement = Placement(self.metrics, self.backlog, disaggregated=True, local_prefill=True)

    def place(self, avoid: Collection[str] = ()) -> Placed:
        return self.placement.place(self.served, 100, 10, avoid)

    def place_while_busy(self) -> tuple[str, list[str]]:
        """Mode and nodes of a prompt that comes when the prefill node has much to do."""
        for number in range(9):
            self.backlog.opened(f"busy {number}", ["p"], prefiller="p", num_tokens=400)
        placed = self.place()
        return placed.mode, [node.name for node in placed.nodes.values()]


@pytest.mark.parametrize(
    ("links", "chosen"),
    [
        ({"d1": "up", "d2": "up"}, {"d1", "d2"}),
        ({"d1": "connecting", "d2": "up"}, {"d2"}),
        # It was up, or has not begun.
        ({"d2": "up"}, {"d2"}),
        ({"d1": "refused: no", "d2": "connecting"}, {"d2"}),
        # As at the start.
        ({"d1": "connecting", "d2": "connecting"}, {"d1", "d2"}),
        ({}, {"d1", "d2"}),
        (None, {"d1", "d2"}),
    ],
)
def test_a_pair_whose_link_is_not_up_waits_for_it_while_there_is_another(
    links: dict[str, str] | None, chosen: set[str]
) -> None:
    world = World(node("p", "prefill", links=links), node("d1", "decode"), node("d2", "decode"))
    placed = [world.place() for _ in range(4)]
    assert {nodes.nodes[Half.DECODE].name for nodes in placed} == chosen
    assert {nodes.mode for nodes in placed} == {"disaggregated"}


def test_a_prefill_node_that_has_not_said_which_links_are_up_is_used() -> None:
    world = World(node("p1", "prefill", links={"d": "up"}), node("d", "decode"))
    world.served = replace(world.served, prefill=[*world.served.prefill, node("p2", "prefill", links=None)])
    assert {world.place().nodes[Half.PREFILL].name for _ in range(4)} == {"p1", "p2"}


def test_a_decode_node_whose_slots_are_taken_computes_no_prompt() -> None:
    assert World(node("p", "prefill"), node("d", "decode", running=7)).place_while_busy() == ("aggregated", ["d"])
    assert World(node("p", "prefill"), node("d", "decode", running=7, waiting=1)).place_while_busy() == (
        "disaggregated",
        ["p", "d"],
    )


def test_what_this_router_has_just_sent_takes_slots() -> None:
    world = World(node("p", "prefill"), node("d", "decode", running=6))
    for number in range(2):
        world.backlog.opened(f"alone {number}", ["d"], prefiller="d", num_tokens=1)
    assert world.place_while_busy()[0] == "disaggregated"
    world.backlog.closed("alone 0")
    assert world.place_while_busy()[0] == "aggregated"


def test_another_decode_node_has_a_free_slot() -> None:
    world = World(node("p", "prefill"), node("d1", "decode", running=8), node("d2", "decode"))
    assert world.place_while_busy() == ("aggregated", ["d2"])
    assert [[node.name for node in world.place().nodes.values()] for _ in range(2)] == [["d2"]] * 2


@pytest.mark.parametrize("difference", [{"numerics": "int8"}, {"wire": "int8"}])
def test_load_does_not_decide_which_answer_a_seed_gives(difference: dict[str, str]) -> None:
    wire = difference.get("wire", "auto")
    world = World(
        node("p", "prefill", wire=wire), node("d", "decode", numerics=difference.get("numerics", "n"), wire=wire)
    )
    assert world.place_while_busy() == ("disaggregated", ["p", "d"])


def test_a_wire_of_the_dtype_of_the_cache_loses_nothing() -> None:
    world = World(node("p", "prefill", wire="float32"), node("d", "decode", wire="float32"))
    assert world.place_while_busy() == ("aggregated", ["d"])


def test_a_prefill_node_that_is_avoided_is_there() -> None:
    world = World(node("p", "prefill"), node("d", "decode"))
    placed = world.place(avoid={"p"})
    assert (placed.mode, placed.reason) == ("aggregated", "avoided")
    assert b'fallbacks_total{reason="avoided"} 1.0' in world.metrics.exposition()
