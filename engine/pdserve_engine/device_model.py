"""A model on a GPU, called like one on the CPU: host tensors in, host logits out, done when the call returns.

Sampling stays on the CPU, where it is the same for every device. The price is the copy of the logits, 4 bytes for each
id of the vocabulary and row: 0.6 MB a row for 151,936 ids, some 25 microseconds over PCIe 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve_engine.config import max_logits_rows
from pdserve_engine.decode_graphs import DecodeGraphs, is_decode
from pdserve_engine.step_buffers import StepBuffers

if TYPE_CHECKING:
    from pdserve_kernels.interface import AttentionMetadata

    from pdserve_engine.decode_graphs import Capture
    from pdserve_engine.models.config import DecoderConfig
    from pdserve_engine.models.decoder import Decoder


class DeviceModel:
    """Takes the place of ``model`` in a model runner; steps must not overlap.

    Args:
        kv_cache: on the device, which is that of the weights.
        capture: makes graphs of decode steps, here and now; None computes each step launch by launch.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
        kv_cache: torch.Tensor,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        capture: Capture | None,
    ) -> None:
        self.config: DecoderConfig = model.config
        self._model = model
        self._device = kv_cache.device
        on_cuda = self._device.type == "cuda"
        self._buffers = StepBuffers(
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            max_num_blocks=-(-(max_model_len + 1) // kv_cache.shape[4]),
            device=self._device,
        )
        num_rows = max_logits_rows(max_num_seqs)
        self._logits_NV = torch.empty(num_rows, model.config.vocab_size, pin_memory=on_cuda)
        self._graphs: DecodeGraphs | None = None
        if capture is not None:
            self._graphs = DecodeGraphs(
                lambda token_ids_T, metadata, rows_N: model.forward(token_ids_T, metadata, kv_cache, rows_N),
                self._buffers,
                capture,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
            )

    @torch.inference_mode()
    def forward(
        self,
        token_ids_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        logits_rows_N: torch.Tensor,
    ) -> torch.Tensor:
        """See Decoder.forward; all but the cache are host tensors. The cache is written when this returns."""
        if self._device.type != "cuda":
            return self._forward(token_ids_T, metadata, kv_cache, logits_rows_N)
        # Another thread than the one that set the device up may call.
        with torch.cuda.device(self._device):
            logits_NV = self._forward(token_ids_T, metadata, kv_cache, logits_rows_N)
            torch.cuda.current_stream().synchronize()
        return logits_NV

    def _forward(
        self,
        token_ids_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
        logits_rows_N: torch.Tensor,
    ) -> torch.Tensor:
        num_logits = len(logits_rows_N)
        if self._graphs is not None and is_decode(metadata):
            num_rows = len(metadata.query_lens)
            self._logits_NV[:num_rows].copy_(self._graphs.run(token_ids_T, metadata), non_blocking=True)
            # Nearly always all rows: a request may compute one token of its prompt and want none.
            return self._logits_NV[:num_rows] if num_logits == num_rows else self._picked(logits_rows_N)
        token_ids_T, metadata, rows_N = self._buffers.load(token_ids_T, metadata, logits_rows_N)
        logits_NV = self._model.forward(token_ids_T, metadata, kv_cache, rows_N)
        return self._logits_NV[:num_logits].copy_(logits_NV, non_blocking=True)

    def _picked(self, rows_N: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self._logits_NV.index_select(0, rows_N)
