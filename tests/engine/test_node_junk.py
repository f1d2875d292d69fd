"""What no router or peer of ours would say, or only in an unlucky order: a request fails, and the node goes on."""

from __future__ import annotations

import math

import pytest
from pdserve_engine.door import Arrived
from pdserve_protocol.handoff import Final, Retarget
from pdserve_protocol.outputs import Aborted, Failed, Finished, HandedOver
from pdserve_protocol.requests import AbortRequests, AddRequest, ReceiveFrom
from pdserve_protocol.sampling import SamplingParams
from support.engines import VOCAB
from support.node_world import ROUTER, NodeWorld

P_D = {"p": "prefill", "d": "decode"}
P_DD = {"p": "prefill", "d": "decode", "e": "decode"}


def still_serves(world: NodeWorld) -> None:
    world.add("good", "p", "d", range(300, 309), 4)
    world.run(3.0)
    assert world.end("good", "d") == Finished(reason="length")
    world.check_empty()


@pytest.mark.parametrize("token_ids", [[-1], [VOCAB], [1 << 40], [1] * 100])
def test_tokens_of_a_sender_that_no_model_of_ours_would_give(token_ids: list[int]) -> None:
    world = NodeWorld(P_D)
    p = world.nodes["p"]
    p.proc._sending._final = lambda outgoing: Final(token_ids=token_ids, logprobs=None)  # type: ignore[method-assign]
    world.add("a", "p", "d", range(9), 6)
    world.run(1.0)
    assert world.end("a", "p") == HandedOver()
    end = world.end("a", "d")
    assert isinstance(end, Failed)
    assert end.code == "handoff"
    del p.proc._sending._final  # type: ignore[method-assign]
    still_serves(world)


@pytest.mark.parametrize("side", ["p", "d"])
def test_an_id_comes_again_while_blocks_of_its_first_request_are_on_their_way(side: str) -> None:
    world = NodeWorld(P_D)
    world.add("a", "p", "d", range(9), 6)
    while not (world.flights if side == "p" else world.landings):
        assert world.step()
    world.abort("a")
    assert world.end("a", side) == Aborted()
    world.ends.clear()
    p, d = world.nodes["p"], world.nodes["d"]
    if side == "p":
        world.add_half("a", p, send_to=world.send_to("d"))
    else:
        world.add_half("a", d, receive_from=ReceiveFrom(boot_id=p.boot))
    end = world.end("a", side)
    assert isinstance(end, Failed)
    assert end.code == "bad_request"
    world.run(3.0)
    still_serves(world)


def test_a_retarget_whose_receiver_has_cancelled_already() -> None:
    world = NodeWorld(P_DD)
    world.meet()
    world.run(0.5)
    world.nodes["d"].policy.is_full = True
    world.add("a", "p", "d", range(9), 6)
    world.run(0.2)
    p, e = world.nodes["p"], world.nodes["e"]
    world.prompts["a2"], world.max_tokens["a2"] = world.prompts["a"], world.max_tokens["a"]
    world.halves["a2"], world.tokens["a2"] = [p, e], {}
    world.add_half("a2", e, receive_from=ReceiveFrom(boot_id=p.boot))
    e.handle(Arrived(ROUTER, AbortRequests(ids=["a2"])))
    world.settle()
    p.handle(Arrived(ROUTER, Retarget(id="a", new_id="a2", send_to=world.send_to("e"))))
    assert world.end("a", "p") == world.end("a2", "p") == Aborted()
    p.handle(Arrived(ROUTER, AbortRequests(ids=["a2"])))
    world.nodes["d"].policy.is_full = False
    world.run(3.0)
    still_serves(world)


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf])
def test_a_request_that_would_never_be_overdue_is_refused(timeout_s: float) -> None:
    world = NodeWorld(P_D)
    d = world.nodes["d"]
    world.tokens["a"] = {}
    sampling = SamplingParams(max_tokens=2)
    message = AddRequest(id="a", boot_id=d.boot, prompt_token_ids=[1], sampling=sampling, timeout_s=timeout_s)
    d.handle(Arrived(ROUTER, message))
    end = world.end("a", "d")
    assert isinstance(end, Failed)
    assert end.code == "bad_request"
