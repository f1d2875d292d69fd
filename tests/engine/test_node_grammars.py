"""Requests whose grammars take long to compile: they wait, and nobody else does."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pdserve_engine.door import Arrived
from pdserve_engine.errors import BadRequest
from pdserve_engine.grammar import Grammars
from pdserve_engine.request import RequestStatus
from pdserve_protocol.outputs import Aborted, Failed, Finished
from pdserve_protocol.requests import AddRequest, ReceiveFrom
from pdserve_protocol.sampling import Grammar, SamplingParams
from support.node_world import ROUTER, NodeWorld

if TYPE_CHECKING:
    from pdserve_text.grammar import GrammarKind

GRAMMAR = Grammar(kind="regex", source="ab")


class SlowGrammars:
    """Compiles when it is told."""

    def __init__(self) -> None:
        self.begun: list[Future[Any]] = []

    def begin_compile(self, grammar: Grammar) -> Future[Any]:
        self.begun.append(Future())
        return self.begun[-1]


class World(NodeWorld):
    def __init__(self, roles: dict[str, str]) -> None:
        self.grammars = SlowGrammars()
        super().__init__(roles, num_blocks=64, grammars=self.grammars)

    def add_with_grammar(self, id: str, name: str, **fields: Any) -> None:
        node = self.nodes[name]
        self.prompts[id] = [1, 2, 3, 4, 5]
        self.tokens.setdefault(id, {})
        sampling = SamplingParams(max_tokens=3, temperature=0.0, grammar=GRAMMAR)
        prompt = self.prompts[id]
        message = AddRequest(id=id, boot_id=node.boot, prompt_token_ids=prompt, sampling=sampling, **fields)
        node.handle(Arrived(ROUTER, message))

    def compiled(self, error: Exception | None = None) -> None:
        """All nodes take in that the oldest grammar is compiled."""
        future = self.grammars.begun.pop(0)
        if error is None:
            future.set_result(object())
        else:
            future.set_exception(error)
        for node in self.nodes.values():
            with suppress(queue.Empty):
                while True:
                    node.handle(node.inbox.get_nowait())


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    world = World({"d": "decode"})
    world.add_with_grammar("waits", "d")
    world.prompts["other"], world.max_tokens["other"], world.tokens["other"] = [1, 2], 4, {}
    world.add_half("other", world.nodes["d"])
    world.settle()
    assert world.end("other", "d") == Finished(reason="length")
    assert not world.tokens["waits"]
    world.compiled()
    world.settle()
    assert world.end("waits", "d") == Finished(reason="length")
    world.check_tokens("waits")
    world.check_empty()


def test_a_fault_ends_its_request_alone() -> None:
    world = World({"d": "decode"})
    world.add_with_grammar("bad", "d")
    world.add_with_grammar("good", "d")
    world.compiled(BadRequest("grammar: it has a fault"))
    world.compiled()
    world.settle()
    assert world.end("bad", "d") == Failed(code="bad_request", message="grammar: it has a fault")
    assert world.end("good", "d") == Finished(reason="length")
    world.check_empty()


def test_a_request_that_has_ended_is_not_started() -> None:
    world = World({"d": "decode"})
    node = world.nodes["d"]
    world.halves["gone"] = [node]
    world.add_with_grammar("gone", "d")
    world.abort("gone")
    assert world.end("gone", "d") == Aborted()
    world.compiled(BadRequest("too late"))
    world.settle()
    assert not world.tokens["gone"]
    world.check_empty()


def test_kv_comes_while_the_grammar_is_compiled() -> None:
    world = World({"p": "prefill", "d": "decode"})
    sender, receiver = world.nodes["p"], world.nodes["d"]
    world.add_with_grammar("r", "p", send_to=world.send_to("d"))
    world.compiled()
    world.add_with_grammar("r", "d", receive_from=ReceiveFrom(boot_id=sender.boot))
    world.settle()
    request = receiver.engine.scheduler.requests["r"]
    assert request.status is RequestStatus.WAITING
    assert receiver.engine.scheduler.num_waiting == 1
    world.compiled()
    world.settle()
    assert world.end("r", "d") == Finished(reason="length")
    assert world.proofs["r"].recomputed_tokens == 0
    world.check_tokens("r")
    world.check_empty()


def test_what_a_request_keeps_is_not_compiled_again() -> None:
    compiled: list[str] = []

    class Matcher:
        def copy(self) -> Matcher:
            return Matcher()

    class Compiler:
        def matcher(self, kind: GrammarKind, source: str) -> Matcher:
            compiled.append(source)
            return Matcher()

    grammars = Grammars(Compiler(), 8)  # type: ignore[arg-type]
    kept = grammars.compile(GRAMMAR)
    grammars.state(GRAMMAR)
    assert compiled == ["ab"]
    del kept
    grammars.state(GRAMMAR)
    assert compiled == ["ab", "ab"]
    grammars.close()
