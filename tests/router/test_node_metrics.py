"""What nodes say of themselves, on the router's /metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import uvloop
from pdserve_protocol.node import Histogram
from pdserve_router import node_metrics
from prometheus_client.parser import text_string_to_metric_families
from support.router_cluster import RouterCluster, pair, router_cluster

if TYPE_CHECKING:
    import pytest

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scraped(c: RouterCluster) -> Samples:
    families = text_string_to_metric_families((await c.get("/metrics"))[1])
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"pdserve_node_{name}", frozenset(labels.items())


def test_counters_gauges_and_histograms_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    # B116: what each node counted, under the name of that node.
    monkeypatch.setattr(node_metrics, "FRESH_S", 0.0)

    async def main() -> None:
        async with router_cluster(pair([70, 71])) as c:
            prefill, decode = c.prefill[0], c.decode[0]
            prefill.status |= {"counters": {"prompt_tokens_computed": 30, "requests_failed": 1}}
            decode.status |= {
                "counters": {"prompt_tokens_computed": 0, "prompt_tokens_transferred": 30, "no metric": 1},
                "peer_counters": {prefill.address: {"bytes_landed": 4096, "digest_mismatches": 2}},
                "gauges": {"blocks_reserved": 3},
                "histograms": {
                    "grant_s": Histogram(bounds=[0.1, 1.0], counts=[2, 1, 1], sum=3.5),
                    "odd_s": Histogram(bounds=[0.1], counts=[2], sum=3.5),
                },
            }
            samples = await scraped(c)
            p, d = prefill.address, decode.address
            assert samples[key("prompt_tokens_computed_total", node=p)] == 30
            assert samples[key("prompt_tokens_computed_total", node=d)] == 0
            assert samples[key("prompt_tokens_transferred_total", node=d)] == 30
            assert samples[key("requests_failed_total", node=p)] == 1
            assert samples[key("peer_bytes_landed_total", node=d, peer=p)] == 4096
            assert samples[key("peer_digest_mismatches_total", node=d, peer=p)] == 2
            assert samples[key("blocks_reserved", node=d)] == 3
            assert samples[key("blocks", node=d, state="free")] == 10
            buckets = [samples[key("handoff_grant_seconds_bucket", node=d, le=le)] for le in ("0.1", "1.0", "+Inf")]
            assert buckets == [2, 3, 4]
            assert samples[key("handoff_grant_seconds_sum", node=d)] == 3.5
            assert not any("odd" in name or "no metric" in name for name, _ in samples)

    uvloop.run(main())


def test_nodes_that_do_not_answer_hold_up_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_metrics, "DEADLINE_S", 0.1)

    async def main() -> None:
        async with router_cluster(pair([70, 71])) as c:
            c.prefill[0].mute = True
            since = time.monotonic()
            names = {dict(labels).get("node") for name, labels in await scraped(c) if name == "pdserve_node_running"}
            assert names == {c.decode[0].address}
            assert time.monotonic() - since < 2
            # The next one, at once, asks nobody.
            c.decode[0].status["gauges"] = {"blocks_reserved": 1}
            assert key("blocks_reserved", node=c.decode[0].address) not in await scraped(c)

    uvloop.run(main())
