"""Flags of ``pdserve bench``. Imports nothing but argparse: every ``pdserve`` command reads this module."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_BENCH = "Measures servers from outside, and computation against the limits of the machine."
_SERVE = """\
Sends streaming requests to an OpenAI server and measures what its clients see: time to the first and to the second
token, time per token, gaps between tokens, time to the end, tokens and requests per second. Works with any server that
streams completions; random prompts are lists of token ids, fresh in every run unless --seed is given.
"""
_SERVE_EPILOG = """\
lengths are N, uniform:LOW-HIGH, or lognormal:MEDIAN,SIGMA

examples:
  pdserve bench serve --concurrency 16 --input-len 512 --output-len 64 --num-prompts 128
  pdserve bench serve --concurrency 8 --num-prompts 8 --output-len 1000 --beside 1,2000,16
  pdserve bench serve --request-rate 2 --arrivals gamma --burstiness 0.5 --slo ttft:500ms,itl:50ms --plot run.html
"""
_KERNELS = """\
Times every operation of a decode and of a prefill step inside real steps of a real model, and whole steps, against the
floor that the same run measures: bytes over read bandwidth, or FLOPs over the fastest matrix product.
"""
_KERNELS_EPILOG = """\
examples:
  pdserve bench kernels
  taskset -c 0 pdserve bench kernels --batch-sizes 1 16 --prefill-lens 512 --json kernels.json --plot kernels.html
"""
_ROUTER = """\
Measures the router by itself: it runs on one core, in front of a prefill and a decode node that have no model and
answer at once with tokens of a real tokenizer; they and a client that only counts share another core. Prints streamed
tokens and plain requests per second, and the router's processor time per 1,000 chunks and per request.
"""
_ROUTER_EPILOG = """\
examples:
  pdserve bench router
  pdserve bench router --concurrency 16 --step-ms 20 --json router.json
"""
_KV = """\
Writes KV blocks from one process into another's landing region, through connectors by themselves and through the mover
of a node, beside NIXL moving one contiguous buffer, one raw socket stream and memcpy in the same run. By default the
KV of a 512-token prompt of SmolLM2, as one write.
"""
_KV_EPILOG = """\
on two hosts: the same command with --connect HOST here, and there: pdserve bench kv --listen HOST

examples:
  pdserve bench kv
  pdserve bench kv --connectors tcp --blocks 1 8 32 128 --csv kv.csv --plot kv.png
"""

_HANDOFF = """\
Starts a prefill node, a decode node and a router on this machine and measures what handing over costs a request: the
gap between its first and second token beyond a decode step (gap), the time from offer to grant on a decode node with a
full batch (grants), memory that is reserved and does not decode yet, by --grant-policy (policies), and throughput with
digests over that without (digests).
"""
_HANDOFF_EPILOG = """\
examples:
  pdserve bench handoff
  pdserve bench handoff --measures gap --num-prompts 50 --kv-connector tcp --json gap.json
"""


def add_bench(commands: Any) -> None:
    """Adds ``bench`` and its own commands to the subparsers of ``pdserve``."""
    bench = _sub(commands, "bench", "load on a server; kernels against the machine's limits", _BENCH, "")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK", title="benchmarks")
    _add_serve(benchmarks)
    _add_kernels(benchmarks)
    _add_router(benchmarks)
    _add_kv(benchmarks)
    _add_handoff(benchmarks)


def _add_serve(benchmarks: Any) -> None:
    serve = _sub(benchmarks, "serve", "what clients of a server see", _SERVE, _SERVE_EPILOG)
    add = serve.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server, without /v1 (default: %(default)s)")
    add("--model", metavar="NAME", help="as requests name it (default: the first that the server has)")
    add("--endpoint", choices=["completions", "chat"], default="completions", help="default: %(default)s")
    load = serve.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="closed loop: so many requests under way at any time (default: 1, without --request-rate)",
    )
    load.add_argument(
        "--request-rate", type=float, metavar="R", help="open loop: R requests per second, whatever the server does"
    )
    add(
        "--arrivals",
        choices=["poisson", "constant", "gamma"],
        default="poisson",
        help="gaps between requests of an open loop (default: %(default)s)",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of --arrivals gamma: below 1 in bursts, 1 as poisson, above more even (default: %(default)g)",
    )
    add("--num-prompts", type=int, default=64, metavar="N", help="requests that are measured (default: %(default)s)")
    add("--warmup", type=int, default=2, metavar="N", help="requests before those (default: %(default)s)")
    add("--input-len", default="512", metavar="LENGTHS", help="tokens of a random prompt (default: %(default)s)")
    add(
        "--output-len",
        default="64",
        metavar="LENGTHS",
        help="tokens of an output; end tokens are ignored (default: %(default)s)",
    )
    add(
        "--beside",
        metavar="N,INPUT,OUTPUT",
        help="other requests, not measured: N under way all the time, with INPUT prompt and OUTPUT output tokens",
    )
    add("--prompts", type=Path, metavar="FILE", help="prompts, one a line; .jsonl: 'prompt' or 'messages' of each")
    add(
        "--tokenizer-vocab",
        type=int,
        metavar="N",
        help="token ids of random prompts are below N (default: the vocabulary's size, where the server says it)",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="default: %(default)g")
    add("--extra-body", metavar="JSON", help='an object: more fields of every request, as {"logprobs": 5}')
    add("--seed", type=int, metavar="N", help="of prompts, lengths and arrivals (default: another in every run)")
    add(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds after which a request has failed (default: %(default)g)",
    )
    add(
        "--slo",
        default="",
        metavar="WHAT:LIMIT,...",
        help="objectives for goodput: ttft, second, tpot, itl (99th percentile in a request), e2e, as ttft:500ms",
    )
    add(
        "--watch-pid",
        type=int,
        nargs="+",
        default=[],
        metavar="PID",
        help="processes of this machine whose processor time per 1,000 output tokens is measured",
    )
    _add_outputs(serve)


def _add_kernels(benchmarks: Any) -> None:
    kernels = _sub(benchmarks, "kernels", "operations and whole steps against the floor", _KERNELS, _KERNELS_EPILOG)
    add = kernels.add_argument
    add(
        "--model",
        default="smollm2",
        help="a Hugging Face folder, a GGUF file, or smollm2, the demo model (default: %(default)s)",
    )
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default: %(default)s")
    add("--kv-cache-dtype", choices=["auto", "int8", "fp8"], default="auto", help="default: %(default)s, as --dtype")
    add("--backend", default="auto", metavar="NAME", help="backend that is measured (default: %(default)s)")
    add(
        "--baseline",
        default="torch",
        metavar="NAME",
        help="backend that it is compared with, or none (default: %(default)s)",
    )
    add("--threads", type=int, default=1, metavar="N", help="threads of a step (default: %(default)s)")
    add(
        "--batch-sizes",
        type=int,
        nargs="*",
        default=[1, 4, 16, 64],
        metavar="N",
        help="requests of the decode steps (default: 1 4 16 64)",
    )
    add("--context", type=int, default=512, metavar="N", help="tokens of each of them (default: %(default)s)")
    add(
        "--prefill-lens",
        type=int,
        nargs="*",
        default=[512, 2048],
        metavar="N",
        help="prompts of the prefill steps (default: 512 2048)",
    )
    add("--repetitions", type=int, default=10, metavar="N", help="of each step (default: %(default)s)")
    _add_outputs(kernels)


def _add_router(benchmarks: Any) -> None:
    router = _sub(benchmarks, "router", "what the router itself costs", _ROUTER, _ROUTER_EPILOG)
    add = router.add_argument
    add("--model", default="smollm2", help="whose tokenizer is used (default: %(default)s)")
    add("--router-core", type=int, metavar="N", help="core of the router (default: the first that may be used)")
    add("--concurrency", type=int, default=64, metavar="N", help="connections (default: %(default)s)")
    add("--output-len", type=int, default=128, metavar="N", help="tokens of a stream (default: %(default)s)")
    add("--step-ms", type=float, default=20.0, metavar="MS", help="of the paced nodes (default: %(default)g)")
    add("--seconds", type=float, default=5.0, metavar="S", help="of each load (default: %(default)g)")
    _add_label_and_json(router)


def _add_kv(benchmarks: Any) -> None:
    kv = _sub(
        benchmarks, "kv", "KV blocks between two processes, beside raw NIXL, a socket and memcpy", _KV, _KV_EPILOG
    )
    add = kv.add_argument
    add(
        "--connectors",
        nargs="+",
        default=["nixl", "nixl/tcp", "tcp"],
        metavar="NAME",
        help="nixl/tcp is NIXL with UCX_TLS=tcp (default: nixl nixl/tcp tcp)",
    )
    add("--block-bytes", type=int, nargs="+", default=[368_640], metavar="N", help="default: 368640")
    add("--blocks", type=int, nargs="+", default=[32], metavar="N", help="of one write (default: 32)")
    add("--concurrency", type=int, nargs="+", default=[1], metavar="N", help="writes at a time (default: 1)")
    add(
        "--wire-dtypes",
        nargs="+",
        choices=["auto", "int8", "fp8"],
        default=["auto"],
        metavar="DTYPE",
        help="auto, int8, fp8: how numbers travel through the mover (default: auto, as they are)",
    )
    add("--repetitions", type=int, default=30, metavar="N", help="default: %(default)s")
    hosts = kv.add_mutually_exclusive_group()
    hosts.add_argument("--listen", metavar="HOST[:PORT]", help="receives for runs on other hosts, port 7003")
    hosts.add_argument("--connect", metavar="HOST[:PORT]", help="another host that listens")
    add("--cluster-key", help="of both hosts (default: $PDSERVE_CLUSTER_KEY)")
    add("--insecure", action="store_true", help="listen off loopback without a cluster key")
    add("--mooncake", type=Path, metavar="PYTHON", help="an interpreter with Mooncake's transfer engine, to compare")
    add("--csv", type=Path, metavar="FILE", help="writes the result as CSV")
    _add_outputs(kv)


def _add_handoff(benchmarks: Any) -> None:
    handoff = _sub(benchmarks, "handoff", "what handing over costs a request", _HANDOFF, _HANDOFF_EPILOG)
    add = handoff.add_argument
    measures = ["gap", "grants", "policies", "digests"]
    add("--model", default="smollm2", help="default: %(default)s, the demo model")
    add("--measures", nargs="+", choices=measures, default=measures, metavar="NAME", help=f"of {', '.join(measures)}")
    add("--num-prompts", type=int, default=24, metavar="N", help="of each load (default: %(default)s)")
    add("--input-len", type=int, default=512, metavar="N", help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=64, metavar="N", help="tokens of an output (default: %(default)s)")
    add("--concurrency", type=int, default=8, metavar="N", help="requests at a time (default: %(default)s)")
    add("--repetitions", type=int, default=5, metavar="N", help="loads of each, in turns (default: %(default)s)")
    add("--kv-connector", default="nixl", metavar="NAME", help="of both nodes (default: %(default)s)")
    _add_label_and_json(handoff)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    _add_label_and_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="writes a picture (.png), or one and tables (.html)")


def _add_label_and_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--label", default="", help="names the run in what is printed and written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the result as JSON")


def _sub(subparsers: Any, name: str, text: str, description: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=text,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser
