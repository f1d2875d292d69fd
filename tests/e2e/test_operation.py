"""One prefill node, one decode node and a router in everyday use: what they cost, tell, and refuse to be shaken by."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import socket
import struct
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import openai
import pytest
import zmq
from pdserve_protocol.codec import encode
from pdserve_protocol.handoff import Final, LinkRefused, Offer, PeerMessage, Sent, StaleBoot
from pdserve_protocol.node import Hello, Ping
from pdserve_protocol.requests import AbortRequests, AddRequest, ReceiveFrom, SendTo
from pdserve_protocol.sampling import SamplingParams
from support.clients import Stream, greedy, prompt_of
from support.cluster import Cluster, Process, port_of, wait_for
from support.flood import flooded
from support.listening import listening_addresses
from support.models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_protocol.codec import Message

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("operation")
    model = tiny_model(folder / "tiny", max_position_embeddings=16384)
    with Cluster(
        model=str(model), folder=folder, node_args=["--dtype", "float32", "--kv-cache-memory", "64MiB"]
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _idle_afterwards(cluster: Cluster) -> Iterator[None]:
    """Whatever a test does, no request and no block is left behind, and every process still is the first one."""
    yield
    cluster.wait_until_idle()
    assert all(process.popen.poll() is None for process in processes(cluster))


def processes(cluster: Cluster) -> list[Process]:
    return [*cluster.prefill, *cluster.decode, cluster.router]


def node_command(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """``pdserve node WORDS`` with the addresses of both nodes."""
    addresses = [f"127.0.0.1:{port_of(node.ready_line)}" for node in [*cluster.prefill, *cluster.decode]]
    return subprocess.run(
        [sys.executable, "-m", "pdserve_cli.main", "node", *words, *addresses],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_idle_processes_sleep(cluster: Cluster) -> None:
    """They neither spin nor wake up often: what a wake-up costs depends on the host, their number does not."""
    answer = cluster.complete(prompt_of(1, 100), max_tokens=5, ignore_eos=True)
    assert answer["pdserve"]["transport"] == "nixl"
    cluster.wait_until_idle()
    resident: list[int] = []
    while resident != (resident := [node.rss_bytes() for node in cluster.decode]):
        time.sleep(0.5)  # The pages of the landing region are still being made.
    before = [(process.cpu_s(), process.sleeps()) for process in processes(cluster)]
    since = time.monotonic()
    time.sleep(4.0)  # What is measured takes time.
    for process, (cpu_s, sleeps) in zip(processes(cluster), before, strict=True):
        seconds = time.monotonic() - since
        assert (process.sleeps() - sleeps) / seconds <= 200, process.name
        assert (process.cpu_s() - cpu_s) / seconds <= 0.25, process.name


# ---- the official client -------------------------------------------------------------------------------------------


def test_memory_beyond_weights_and_cache_is_bounded(cluster: Cluster) -> None:
    cluster.complete(**greedy(prompt_of(3, 2000), 20))
    for status in cluster.statuses():
        gauges = status.gauges
        assert 0 < gauges["memory_kv_cache_bytes"] <= 64 << 20
        assert gauges["memory_resident_bytes"] > gauges["memory_beyond_bytes"] > 0
        # The landing region of the decode node is a part of it.
        assert gauges["memory_beyond_bytes"] < 600e6


def test_openai_client(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        chat = client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=20, logprobs=True, top_logprobs=2
        )
        assert chat.usage is not None
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
        assert chat.model_extra is not None
        assert chat.model_extra["pdserve"]["mode"] == "disaggregated"
        chat_chunks: Any = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(chat_chunks)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == chat.choices[0].message.content
        assert chunks[-1].usage == chat.usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )

        text = client.completions.create(model="tiny", prompt="what is", temperature=0, max_tokens=20, logprobs=2)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.tokens is not None
        assert text.usage is not None
        assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
        parts = client.completions.create(model="tiny", prompt="what is", temperature=0, max_tokens=20, stream=True)
        assert "".join(part.choices[0].text for part in parts) == text.choices[0].text
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt="what is")
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="tiny", prompt="what is", max_tokens=-1)


def test_openai_async_client(cluster: Cluster) -> None:
    async def use() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key="any", max_retries=0
        ) as client:
            chat, text = await asyncio.gather(
                client.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, max_tokens=12),
                client.completions.create(model="tiny", prompt="what is", seed=3, max_tokens=12),
            )
            streamed: Any = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, seed=3, max_tokens=12, stream=True
            )
            content = "".join([chunk.choices[0].delta.content or "" async for chunk in streamed])
            assert content == chat.choices[0].message.content
            parts = await client.completions.create(model="tiny", prompt="what is", seed=3, max_tokens=12, stream=True)
            assert "".join([part.choices[0].text async for part in parts]) == text.choices[0].text

    asyncio.run(use())


# ---- streams -------------------------------------------------------------------------------------------------------


def test_tokens_are_sent_as_they_are_made(cluster: Cluster) -> None:
    # B85
    begun = time.monotonic()
    with Stream(cluster.port, greedy(prompt_of(2, 40), 2000)) as stream:
        stream.wait_end()
    assert stream.is_whole
    whole = stream.arrivals[-1] - begun
    assert stream.arrivals[0] - begun < 0.2 * whole, "the first token waited for others"
    gaps = [b - a for a, b in zip(stream.arrivals, stream.arrivals[1:], strict=False)]
    assert max(gaps) < 0.3 * whole, "the answer came in lumps"
    assert sum(gap > 1e-4 for gap in gaps) > 100


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_ends_its_request_on_both_nodes(cluster: Cluster, streaming: bool) -> None:
    # B42
    before = aborted(cluster)
    with Stream(cluster.port, greedy(prompt_of(3, 50), 16000), stream=streaming) as stream:
        if streaming:
            stream.wait_tokens(5)
        wait_for(lambda: cluster.statuses()[1].load.running == 1, 10.0, "the decode node generates")
    wait_for(cluster.is_idle, 2.0, "both halves are over")
    assert aborted(cluster) == before + 1


def aborted(cluster: Cluster) -> float:
    """On the decode node."""
    return cluster.statuses()[1].counters["requests_aborted"]


def test_no_answer_has_anything_of_another(cluster: Cluster) -> None:
    # B29: what is echoed here is the whole prompt, through every layer: another secret gives another answer.
    system = {"role": "system", "content": "the question and the answer are what we have by now " * 20}

    def body(number: int) -> dict[str, Any]:
        secret = random.Random(number).randbytes(12).hex()
        messages = [system, {"role": "user", "content": f"the secret is {secret}"}]
        return {"messages": messages, "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    alone = []
    for number in range(8):
        status, answer = cluster.post("/v1/chat/completions", body(number))
        assert status == 200, answer
        alone.append(answer["choices"][0]["message"]["content"])
    assert len(set(alone)) == 8
    streams = [Stream(cluster.port, body(number), path="/v1/chat/completions") for number in range(16)]
    dropped = [Stream(cluster.port, body(number), path="/v1/chat/completions") for number in range(4, 8)]
    for count, stream in enumerate(dropped):
        stream.wait_tokens(1 + 5 * count)
        stream.close()
    texts = [stream.wait_end().text for stream in streams]
    assert all(stream.is_whole for stream in streams), streams
    assert texts[:8] == alone
    for number in range(8, 16):
        status, answer = cluster.post("/v1/chat/completions", body(number))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, texts[number])


def test_one_request_id_for_many_requests(cluster: Cluster) -> None:
    # B62
    headers = {"X-Request-Id": "the-same"}
    bodies = [greedy(prompt_of(seed, 30 + seed), 40) for seed in range(10, 16)]
    alone = [cluster.complete(**body)["choices"][0]["text"] for body in bodies]
    streams = [Stream(cluster.port, body, headers=headers) for body in bodies]
    assert [stream.wait_end().text for stream in streams] == alone
    for body, text in zip(bodies, alone, strict=True):
        with Stream(cluster.port, body, headers=headers, stream=False) as stream:
            assert stream.wait_end().text == text
            assert stream.headers["x-request-id"] == "the-same"


# ---- what operators see --------------------------------------------------------------------------------------------


def test_idle_nodes_settle_hand_offs_and_reset_their_caches(cluster: Cluster) -> None:
    # B40
    cluster.complete(prompt_of(20, 100), max_tokens=20, ignore_eos=True)
    # Nothing else is sent: what is left to settle between the nodes they settle alone.
    cluster.wait_until_idle(2.0)
    status = node_command(cluster, "status", "--json")
    assert status.returncode == 0, status.stderr
    for line in status.stdout.splitlines():
        load = json.loads(line)["load"]
        assert load["blocks_held"] == load["blocks_in_use"] == load["handoffs"] == 0
    assert min(node.load.blocks_cached for node in cluster.statuses()) >= 100 // BLOCK_SIZE
    assert node_command(cluster, "reset-cache").returncode == 0
    assert [node.load.blocks_cached for node in cluster.statuses()] == [0, 0]
    with Stream(cluster.port, greedy(prompt_of(20, 100), 16000)) as stream:
        stream.wait_tokens(20)
        reset = node_command(cluster, "reset-cache")
        assert reset.returncode == 1, "blocks were in use, and it said that all is forgotten"
        assert "in use" in reset.stdout


def test_counters_tell_what_was_done(cluster: Cluster) -> None:
    # B110, B116
    before = [status.counters for status in cluster.statuses()]
    lengths = [1, 15, 16, 17, 40, 100, 200, 33, 64, 65]
    answers = [cluster.complete(prompt_of(100 + n, n), max_tokens=7, ignore_eos=True) for n in lengths]
    with Stream(cluster.port, greedy(prompt_of(99, 48), 16000)) as stream:
        stream.wait_tokens(3)
    cluster.wait_until_idle()
    prefill, decode = (
        {name: after.counters[name] - earlier[name] for name in earlier}
        for earlier, after in zip(before, cluster.statuses(), strict=True)
    )
    num_prompt_tokens = sum(lengths) + 48
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in [*lengths, 48])
    assert prefill["prompt_tokens_computed"] == num_prompt_tokens
    assert prefill["generated_tokens"] == 11
    assert prefill["requests_handed_over"] == 11
    assert decode["prompt_tokens_transferred"] == num_prompt_tokens
    assert decode["prompt_tokens_computed"] == decode["prompt_tokens_cached"] == decode["recomputed_tokens"] == 0
    assert decode["requests_length"] == 10
    assert decode["requests_aborted"] == 1
    assert decode["blocks_landed"] == num_blocks
    assert decode["digest_mismatches"] == prefill["requests_failed"] == decode["requests_failed"] == 0
    block_bytes = cluster.statuses()[1].info.identity.layout.block_bytes
    assert decode["bytes_landed"] == num_blocks * block_bytes
    for length, answer in zip(lengths, answers, strict=True):
        proof = answer["pdserve"]
        assert proof["tokens_recomputed"] == 0
        assert proof["blocks_moved"] == -(-length // BLOCK_SIZE)
        assert proof["bytes_moved"] == proof["blocks_moved"] * block_bytes


# ---- what comes from outside ---------------------------------------------------------------------------------------


def test_transfer_parameters_of_a_client_mean_nothing(cluster: Cluster) -> None:
    # B105
    body = greedy(prompt_of(30, 40), 10)
    text = cluster.complete(**body)["choices"][0]["text"]
    for parameters in (
        {"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_port": 1, "remote_block_ids": [0, 1, 2]},
        {"do_remote_decode": True, "remote_engine_id": "other"},
        "not even an object",
        None,
    ):
        status, answer = cluster.post("/v1/completions", {**body, "kv_transfer_params": parameters})
        assert status in (200, 400), answer
        if status == 200:
            assert answer["choices"][0]["text"] == text
            assert answer["pdserve"]["transport"] == "nixl"
            assert "kv_transfer_params" not in answer


ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
JUNK = {
    "nothing": b"",
    "random": random.Random(1).randbytes(5000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "pickle": pickle.dumps(print),
    "a ZMTP frame of 2^62 bytes": ZMTP_GREETING + b"\x02" + struct.pack(">Q", 1 << 62) + b"x" * 100,
    "a ZMTP command of 4 GiB": ZMTP_GREETING + b"\x06" + struct.pack(">Q", 1 << 32) + b"\x05READY",
    "half a ZMTP greeting": ZMTP_GREETING[:20],
}


def test_junk_on_every_open_port_disturbs_nobody(cluster: Cluster) -> None:
    # B106
    doors = {where for process in processes(cluster) for where in listening_addresses(process.pid)}
    assert {port for _, port in doors} >= {port_of(node.ready_line) for node in [*cluster.prefill, *cluster.decode]}
    assert {host for host, _ in doors} == {"127.0.0.1"}, "something listens where it was not told to"
    body = greedy(prompt_of(31, 200), 1500)
    text = cluster.complete(**body)["choices"][0]["text"]
    memory = [process.rss_bytes() for process in processes(cluster)]
    with Stream(cluster.port, {**body, "cache_salt": "cold"}) as stream:
        stream.wait_begun()
        for address in sorted(doors):
            for junk in JUNK.values():
                with socket.create_connection(address, timeout=5) as visitor:
                    visitor.sendall(junk)
        assert stream.wait_end().is_whole, stream
    assert stream.text == text
    assert cluster.complete(**body)["choices"][0]["text"] == text
    growth = [process.rss_bytes() - then for process, then in zip(processes(cluster), memory, strict=True)]
    assert max(growth) < 64 << 20, f"room was made for what was announced: {growth}"


def strange_messages(boot_id: str) -> dict[str, bytes | Message]:
    """Messages to a node with this boot id that nobody in the cluster would send."""

    def add(**fields: Any) -> AddRequest:
        given: dict[str, Any] = {"id": uuid.uuid4().hex, "boot_id": boot_id, "prompt_token_ids": [5] * 20}
        return AddRequest(**{**given, "sampling": SamplingParams(max_tokens=4), **fields})

    def peer(body: Any, **fields: Any) -> PeerMessage:
        return PeerMessage(**{"from_boot": "nobody", "to_boot": boot_id, "from_sender": True, "body": body, **fields})

    return {
        "random bytes": random.Random(2).randbytes(300),
        "a pickle": pickle.dumps(print),
        "deeply nested": b"\x91" * 100_000 + b"\xc0",
        "an array of 2^32 - 1": b"\xdd\xff\xff\xff\xff",
        "an empty frame": b"",
        "an unknown message": b"\x92\xa7Nothing\x01",
        "another boot": add(boot_id="another"),
        "no prompt": add(prompt_token_ids=[]),
        "no such token": add(prompt_token_ids=[10**6, -1]),
        "a huge max_tokens": add(sampling=SamplingParams(max_tokens=2**60)),
        "no time": add(timeout_s=-1.0),
        "time that is no number": add(timeout_s=float("nan"), sampling=SamplingParams(max_tokens=1)),
        "to a host that is none": add(send_to=SendTo(host="no host!", port=7002, boot_id="x")),
        "to a host that nobody knows": add(send_to=SendTo(host="nowhere.invalid", port=7002, boot_id="x")),
        "to a port that is none": add(send_to=SendTo(host="127.0.0.1", port=10**7, boot_id="x")),
        "to nobody": add(send_to=SendTo(host="", port=0, boot_id="")),
        "to itself": add(send_to=SendTo(host="127.0.0.1", port=1, boot_id=boot_id)),
        "from nobody": add(receive_from=ReceiveFrom(boot_id="nobody"), timeout_s=1.0),
        "from itself": add(receive_from=ReceiveFrom(boot_id=boot_id), timeout_s=1.0),
        "an unknown abort": AbortRequests(ids=["unknown"] * 1000),
        "an offer without a link": peer(Offer(id="x", num_tokens=-5, eta_s=float("nan"))),
        "blocks without a link": peer(Sent(id="x", digests={-1: b""}, final=Final(token_ids=[-1], logprobs=None))),
        "a refusal of a link": peer(LinkRefused(reason="no"), from_sender=False),
        "a message for another": peer(StaleBoot(boot_id="y"), to_boot="other"),
        "a message from itself": peer(Offer(id="x", num_tokens=1, eta_s=0.0), from_boot=boot_id, link=-(2**60)),
    }


def test_strange_messages_disturb_nobody(cluster: Cluster) -> None:
    # B106
    body = greedy(prompt_of(32, 200), 1500)
    text = cluster.complete(**body)["choices"][0]["text"]
    with Stream(cluster.port, {**body, "cache_salt": "cold"}) as stream:
        stream.wait_begun()
        for node, status in zip([*cluster.prefill, *cluster.decode], cluster.statuses(), strict=True):
            for name, message in strange_messages(status.info.identity.boot_id).items():
                send_to_door(port_of(node.ready_line), message if isinstance(message, bytes) else encode(message))
                assert node.popen.poll() is None, f"{name} has ended the {node.name} node:\n{node.log.read_text()}"
        assert stream.wait_end().is_whole, stream
    assert stream.text == text
    # What such a visitor has begun ends with its silence.
    cluster.wait_until_idle(10.0)
    assert cluster.complete(**body)["choices"][0]["text"] == text


def test_visitors_who_flood_the_doors_hold_up_nobody(cluster: Cluster) -> None:
    body = greedy(prompt_of(33, 200), 60)
    text = cluster.complete(**body)["choices"][0]["text"]
    nodes = [*cluster.prefill, *cluster.decode]
    memory = [node.rss_bytes() for node in nodes]
    with ExitStack() as floods:
        for node in nodes:
            floods.enter_context(flooded(port_of(node.ready_line)))
        answer = cluster.complete(**body, cache_salt="cold")
        assert answer["choices"][0]["text"] == text
        assert (answer["pdserve"]["mode"], answer["pdserve"]["tokens_recomputed"]) == ("disaggregated", 0)
    growth = [node.rss_bytes() - then for node, then in zip(nodes, memory, strict=True)]
    assert max(growth) < 64 << 20, growth


def send_to_door(port: int, data: bytes) -> None:
    """Sends one frame and waits until the node has answered a ping behind it: it has taken the frame in."""
    with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for frame in (data, encode(Hello()), encode(Ping())):
            dealer.send(frame)
        deadline = time.monotonic() + 5
        answers: list[bytes] = []
        while not any(b"NodeInfo" in answer for answer in answers) and time.monotonic() < deadline:
            if dealer.poll(100):
                answers.append(dealer.recv())
        assert answers, "the node does not answer any more"
