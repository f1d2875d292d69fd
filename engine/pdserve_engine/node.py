"""Starts a node: command line in, running EngineCoreProc out. The two node rooms differ in what they pass here."""

from __future__ import annotations

import gc
import logging
import os
import sys
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from pdserve_kv_transfer.connector import Network
from pdserve_kv_transfer.connectors import default_connectors, make_connector, parse_connectors
from pdserve_kv_transfer.errors import SealKeyMissing, TransferError
from pdserve_kv_transfer.mover import DEFAULT_REGION_BYTES, Mover
from pdserve_protocol.door import check_door, is_loopback
from pdserve_protocol.errors import ProtocolError
from pdserve_protocol.inbox import Inbox
from pdserve_protocol.node import NodeIdentity, NodeInfo, TokenizerFiles
from pdserve_text.errors import TextError
from pdserve_text.files import load_tokenizer_files, tokenizer_id

from pdserve_engine import kv_memory
from pdserve_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve_engine.errors import EngineError, UntrustedNetwork
from pdserve_engine.faulty_door import open_door
from pdserve_engine.models.errors import ModelError
from pdserve_engine.proc import EngineCoreProc
from pdserve_engine.process_memory import ProcessMemory, give_back
from pdserve_engine.weights import resolve_model
from pdserve_engine.weights.errors import WeightsError
from pdserve_engine.wiring import build_engine
from pdserve_engine.worker import Worker

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from pdserve_kv_transfer.connector import Connector
    from pdserve_protocol.node import Role

    from pdserve_engine.executor import WorkerBase
    from pdserve_engine.proc import Event
    from pdserve_engine.receiving import ReceivePolicy
    from pdserve_engine.sending import SendPolicy

log = logging.getLogger(__name__)

AUTHENTICATED_CONNECTORS = {"tcp"}
"""Those that let nobody in without the cluster key; what they carry encrypted may leave loopback."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeParts:
    """What is not the same in all nodes.

    Attributes:
        send_policy, receive_policy: None where the node does not hand over, or does not take over.
        wrap_connector: what is done to each KV connector before it is used; drills use it.
        region_bytes: of the landing region of each peer.
        itl_target_s: how long a step with decodes is to take at most; None does not limit.
        make_worker: what computes.
    """

    send_policy: SendPolicy | None = None
    receive_policy: ReceivePolicy | None = None
    wrap_connector: Callable[[Connector], Connector] = lambda connector: connector
    region_bytes: int = DEFAULT_REGION_BYTES
    itl_target_s: float | None = None
    make_worker: Callable[[EngineConfig], WorkerBase] = Worker


def run_node(role: Role, args: argparse.Namespace, parts: NodeParts) -> int:
    """Serves until drained and ends the process with 0; returns 2, with one line on stderr, where it cannot be started.

    Args:
        args: of ``parse_node_args``.
    """
    logging.basicConfig(
        level=args.log_level.upper(), format=f"%(asctime)s %(levelname)s {role}: %(message)s", stream=sys.stderr
    )
    try:
        proc = _build(role, args, parts)
    except (ProtocolError, EngineError, ModelError, WeightsError, TransferError, TextError) as error:
        print(f"{role}-node: {error}", file=sys.stderr)
        return 2
    proc.drain_on_signals()
    info = proc.info
    print(
        f"{role}-node ready on {args.host}:{info.port} (model {info.served_model_name}, "
        f"{info.kv_capacity_tokens // info.identity.layout.block_size} KV blocks)",
        flush=True,
    )
    # What exists now lives as long as the process; the collector need not look at it again.
    gc.collect()
    gc.freeze()
    give_back()
    proc.run()
    _leave()


def _leave() -> NoReturn:
    """Ends the process, in which all is closed, without the destructors of the libraries that KV connectors loaded.

    Some fault there (nixl-cu12 1.5.1 on a host with libibverbs); a drained node must not look like one that crashed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _build(role: Role, args: argparse.Namespace, parts: NodeParts) -> EngineCoreProc:
    """Wires a node; nothing runs yet but the mover, which sleeps.

    Raises:
        ProtocolError, EngineError, ModelError, WeightsError, TransferError, TextError: told to the operator.
    """
    check_door(args.host, args.cluster_key, args.insecure)
    specs = parse_connectors(args.kv_connector or default_connectors())
    is_closed = args.kv_encrypt and {spec.name for spec in specs} <= AUTHENTICATED_CONNECTORS
    if not args.kv_trusted_network and not is_closed and not is_loopback(args.host):
        raise UntrustedNetwork(args.host)
    if args.kv_encrypt and args.cluster_key is None:
        raise SealKeyMissing
    network = Network(host=args.host, advertise_host=args.advertise_host, cluster_key=args.cluster_key)
    connectors = {spec.name: parts.wrap_connector(make_connector(spec, network)) for spec in specs}
    inbox: Inbox[Event] = Inbox()
    # The port is taken first: that it is not free should not be learnt after loading a model.
    door = open_door(args.host, args.port, args.cluster_key, inbox.put, [spec.faults for spec in specs])
    with ExitStack() as unless_wired:
        unless_wired.callback(door.close)
        folder = resolve_model(args.model)
        core, worker = build_engine(
            EngineConfig(
                model=ModelConfig(
                    path=folder,
                    dtype=args.dtype,
                    quantization=args.quantization,
                    max_model_len=args.max_model_len,
                ),
                cache=CacheConfig(
                    block_size=args.block_size, dtype=args.kv_cache_dtype, memory_bytes=args.kv_cache_memory
                ),
                scheduler=SchedulerConfig(
                    max_num_seqs=args.max_num_seqs,
                    max_num_batched_tokens=args.max_num_batched_tokens,
                    itl_target_s=parts.itl_target_s,
                ),
                num_threads=args.threads,
                device=args.device,
                enforce_eager=args.enforce_eager,
            ),
            make_worker=parts.make_worker,
        )
        files = load_tokenizer_files(folder)
        tokenizer = TokenizerFiles(tokenizer_id=tokenizer_id(files), files=files)
        mover = Mover(
            worker.kv_bytes(),
            inbox.put,
            connectors=connectors,
            region_bytes=parts.region_bytes,
            secret=args.cluster_key,
        )
        unless_wired.callback(mover.close)
        for name in connectors:
            mover.prepare(name)
        unless_wired.pop_all()
    if isinstance(cache := worker.kv_bytes(), np.ndarray):
        kv_memory.make_pages(cache)
    info = NodeInfo(
        identity=NodeIdentity(
            boot_id=uuid.uuid4().hex,
            role=role,
            model_id=worker.model_id,
            tokenizer_id=tokenizer.tokenizer_id,
            numerics=worker.numerics,
            layout=worker.layout,
            digest=args.kv_digest,
            connectors=list(connectors),
            kv_wire_dtype=args.kv_wire_dtype,
            kv_encrypt=args.kv_encrypt,
        ),
        served_model_name=args.served_model_name or args.model.rstrip("/").rpartition("/")[2],
        port=door.port,
        advertise_host=args.advertise_host,
        max_model_len=worker.max_model_len,
        kv_capacity_tokens=worker.num_blocks * worker.layout.block_size,
        vocab_size=worker.vocab_size,
        software=f"pdserve {version('pdserve')}",
        max_num_seqs=args.max_num_seqs,
    )
    return EngineCoreProc(
        core,
        mover,
        door,
        inbox,
        info,
        tokenizer,
        send_policy=parts.send_policy,
        receive_policy=parts.receive_policy,
        drain_timeout_s=args.drain_timeout,
        memory=ProcessMemory(worker.weight_bytes, worker.kv_bytes()),
    )
