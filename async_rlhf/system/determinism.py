"""The same bits every time, on a GPU too."""

from __future__ import annotations

import os

import torch
from torch import Tensor

_BLOCK = 256


def prepare_deterministic() -> None:
    """Have this process and those that it starts compute with deterministic kernels only. Kernels that have no
    deterministic form then raise an error that names them.

    A CPU needs none of this: its kernels are deterministic for equal numbers of threads. On a GPU it must be called
    before the first product of matrices.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the only sizes with which cuBLAS repeats its sums
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # transformers passes it on to flash-attn
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # else a completion depends on which others share its batch
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # reveals errors, costs time
    torch.backends.cudnn.benchmark = False
    # Neither has a deterministic backward pass; flash attention has, and the plain formula needs none.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def cumulative_sums(values_BV: Tensor) -> Tensor:
    """Sums of each row's first entries, (B, V) of the same type; on a GPU, CUDA's own are not deterministic.

    There they are sums within blocks by a product with a triangle of ones, plus the sums of the blocks before.
    """
    if values_BV.device.type == "cuda" and torch.are_deterministic_algorithms_enabled():
        return _sums_by_blocks(values_BV)
    return values_BV.cumsum(dim=-1)


def _sums_by_blocks(values_BV: Tensor) -> Tensor:
    rows, length = values_BV.shape
    padded_BKL = torch.nn.functional.pad(values_BV, (0, -length % _BLOCK)).view(rows, -1, _BLOCK)
    blocks = padded_BKL.shape[1]
    ones = torch.ones(max(blocks, _BLOCK), max(blocks, _BLOCK), dtype=values_BV.dtype, device=values_BV.device).triu()
    within_BKL = padded_BKL @ ones[:_BLOCK, :_BLOCK]
    totals_BK = within_BKL[:, :, -1]
    before_BK = totals_BK @ ones[:blocks, :blocks] - totals_BK
    return (within_BKL + before_BK[:, :, None]).view(rows, -1)[:, :length]
