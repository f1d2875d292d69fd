"""Worker: one model on one device, loaded and ready to compute steps.

Owns weights, the memory of the KV cache and the model runner. Knows nothing of requests that wait, of peers or of text.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch
from pdserve_kernels.errors import KernelError
from pdserve_kernels.select import select_backend
from pdserve_protocol.node import KVLayout, kv_block_bytes
from pdserve_text.errors import TokenizerFilesError
from pdserve_text.files import TOKENIZER, folder_end_token_ids, load_tokenizer_files
from pdserve_text.grammar import GrammarCompiler

from pdserve_engine import kv_memory
from pdserve_engine.device import CudaCapture, find_device, free_device_memory
from pdserve_engine.device_cache import TorchDeviceCache
from pdserve_engine.device_model import DeviceModel
from pdserve_engine.errors import ContextTooLong, NoKernels
from pdserve_engine.grammar import Grammars
from pdserve_engine.model_runner import ModelRunner
from pdserve_engine.models.config import read_config
from pdserve_engine.models.decoder import Decoder
from pdserve_engine.weights import load_weights, model_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve_kernels.interface import Backend
    from pdserve_kv_transfer.cache_memory import Cache

    from pdserve_engine.config import EngineConfig
    from pdserve_engine.models.config import DecoderConfig
    from pdserve_engine.scheduler_output import ModelRunnerOutput, SchedulerOutput

log = logging.getLogger(__name__)


class Worker:
    """Loads the model of ``config`` and allocates its KV cache.

    Attributes:
        layout: of one KV block.
        num_blocks: blocks of the KV cache.
        kv_cache: [num_blocks, kv_heads, layers, 2, block_size, head_dim], page-aligned, on the device; each block one
            run in the order of the layout, codes with their scales after them.
        weight_bytes: of the weights as they were loaded, in the host's memory.
        model_id: hash of configuration and weights.
        numerics: fingerprint of what decides the bits of a result beside the model.
        max_model_len: tokens of one request at most.
        end_token_ids: every id that ends an output, as pdserve_text reads them from the folder, in rising order.
        grammars: for outputs that must keep to one; None where the folder has no tokenizer or no end id.

    Raises:
        ModelError, WeightsError: the model cannot be used.
        NoRoomForCache, ContextTooLong, NoCudaDevice, NoKernels
    """

    def __init__(self, config: EngineConfig, *, backend: str | Backend = "auto") -> None:
        device = find_device(config.device)
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        block_size = config.cache.block_size
        kernels = _select(backend, config, device.type, dtype) if isinstance(backend, str) else backend
        kernels.set_threads(config.num_threads or len(os.sched_getaffinity(0)))
        folder = config.model.path
        model_config = read_config(folder)
        limit = model_config.max_position_embeddings
        self.max_model_len = config.model.max_model_len or limit
        if self.max_model_len > limit:
            raise ContextTooLong(self.max_model_len, limit)
        weights = load_weights(folder, dtype, str(device))
        self.weight_bytes = sum(tensor.nbytes for tensor in weights.values()) if device.type == "cpu" else 0
        model = Decoder(model_config, weights, kernels, self.max_model_len)
        self.model_id = model_id(folder)
        kv_dtype = config.kv_dtype
        self.numerics = kernels.fingerprint(dtype) + (f"/kv-{kv_dtype}" if kv_dtype != config.model.dtype else "")
        self.vocab_size = model_config.vocab_size
        self.end_token_ids = tuple(sorted(folder_end_token_ids(folder)))
        self.grammars = _grammars(folder, self.end_token_ids, self.vocab_size)
        self.layout = block_layout(model_config, block_size, kv_dtype, kernels.kv_order)
        on_cuda = device.type == "cuda"
        self.num_blocks = kv_memory.num_blocks(
            config.cache, self.layout, device_memory=free_device_memory(device) if on_cuda else None
        )
        if on_cuda:
            blocks_NB = kv_memory.allocate_on(device, self.num_blocks, self.layout)
            self._kv_bytes: Cache = TorchDeviceCache(blocks_NB)
        else:
            kv_bytes = kv_memory.allocate(self.num_blocks, self.layout)
            blocks_NB = torch.from_numpy(kv_bytes)
            self._kv_bytes = kv_bytes
        self.kv_cache = kv_memory.as_tensor(blocks_NB, self.layout)
        scheduler = config.scheduler
        self._runner = ModelRunner(
            DeviceModel(
                model,
                self.kv_cache,
                max_num_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs),
                max_num_seqs=scheduler.max_num_seqs,
                max_model_len=self.max_model_len,
                capture=CudaCapture() if kernels.graph_safe and not config.enforce_eager else None,
            )
            if on_cuda
            else model,
            self.kv_cache,
            config.scheduler,
            max_model_len=self.max_model_len,
            end_token_ids=self.end_token_ids,
            grammars=self.grammars,
        )

    def kv_bytes(self) -> Cache:
        """The memory of the KV cache itself, [num_blocks, block_bytes], writable; by way of the host on a GPU."""
        return self._kv_bytes

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step; steps must not overlap.

        Raises:
            ContractBroken: the step contradicts the steps before it.
        """
        return self._runner.execute_model(scheduler_output)


def _grammars(folder: Path, end_token_ids: Sequence[int], vocab_size: int) -> Grammars | None:
    if not end_token_ids or not (folder / TOKENIZER).is_file():
        return None
    try:
        compiler = GrammarCompiler(load_tokenizer_files(folder), end_token_ids, vocab_size)
    except TokenizerFilesError as error:
        log.warning("requests with a grammar will be refused: %s", error)
        return None
    return Grammars(compiler, vocab_size)


def _select(name: str, config: EngineConfig, device_type: str, dtype: torch.dtype) -> Backend:
    try:
        return select_backend(
            name,
            device_type=device_type,
            block_size=config.cache.block_size,
            dtype=dtype,
            quantization=config.model.quantization,
            quantized_cache=config.kv_dtype != config.model.dtype,
        )
    except KernelError as error:
        raise NoKernels(str(error)) from error


def block_layout(model: DecoderConfig, block_size: int, dtype: str, order: str) -> KVLayout:
    """Of the blocks of a model's cache."""
    num_rows = model.num_kv_heads * model.num_layers * 2 * block_size
    return KVLayout(
        block_size=block_size,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        block_bytes=kv_block_bytes(num_rows, model.head_dim, dtype),
        order=order,
    )
