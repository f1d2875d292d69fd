"""Builds an engine from its configuration: the one place where its parts are joined."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve_engine.block_hash import BlockHasher
from pdserve_engine.core import EngineCore, EngineLimits
from pdserve_engine.executor import UniProcExecutor
from pdserve_engine.kv_cache_manager import KVCacheManager
from pdserve_engine.scheduler import Scheduler
from pdserve_engine.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve_engine.config import EngineConfig
    from pdserve_engine.executor import WorkerBase


def build_engine(
    config: EngineConfig, *, make_worker: Callable[[EngineConfig], WorkerBase] = Worker
) -> tuple[EngineCore, WorkerBase]:
    """Loads the model and allocates the KV cache.

    Raises:
        ModelError, WeightsError, DeviceSetupError: the worker cannot start; see Worker.
    """
    worker = make_worker(config)
    block_size = worker.layout.block_size
    hasher = BlockHasher(worker.model_id, block_size, secrets.token_bytes(32))
    kv = KVCacheManager(worker.num_blocks, block_size, hasher if config.cache.enable_prefix_caching else None)
    scheduler = Scheduler(config.scheduler, kv, max_model_len=worker.max_model_len, end_token_ids=worker.end_token_ids)
    limits = EngineLimits(
        max_model_len=worker.max_model_len, kv_capacity_tokens=kv.capacity_tokens, vocab_size=worker.vocab_size
    )
    return EngineCore(scheduler, UniProcExecutor(worker), limits, worker.grammars), worker
