"""PyTorch's kernel for packed rows where there are simulated GPUs: the operators behind ``varlen_attn``, on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from varlen import backward_kernel, forward_kernel

_registered: list[torch.library.Library] = []


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: int, longest_keys: int,
    dropout: float, is_causal: bool, *_: Any, scale: float | None, window_size_left: int, **__: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    require_as_the_kernel_does(query, key, value, starts, key_starts)
    rest = (starts, key_starts, scale or query.shape[-1] ** -0.5, window_size_left)
    out_NHD, sums_HN = forward_kernel(query.float(), key.float(), value.float(), *rest)
    empty = torch.zeros(0)
    return out_NHD.to(query.dtype), sums_HN, torch.zeros(2, dtype=torch.uint64), empty, empty


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, starts: Tensor,
    key_starts: Tensor, *_: Any, scale: float | None, window_size_left: int, **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    require_as_the_kernel_does(query, key, value, starts, key_starts)
    wide = (gradient.float(), query.float(), key.float(), value.float(), out.float(), sums)
    rest = (starts, key_starts, scale or query.shape[-1] ** -0.5, window_size_left)
    of_query, *heads = backward_kernel(*wide, *rest)
    of_key, of_value = (each.unflatten(1, (key.shape[1], -1)).sum(2) for each in heads)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def require_as_the_kernel_does(query: Tensor, key: Tensor, value: Tensor, *starts: Tensor) -> None:
    """Raise where the kernel of a GPU would."""
    kinds = {tensor.dtype for tensor in (query, key, value)}
    if len(kinds) > 1 or not kinds <= {torch.float16, torch.bfloat16}:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if any(each.dtype != torch.int32 for each in starts):
        raise RuntimeError("cu_seqlens must have dtype int32")
    if query.shape[-1] % 8 or query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]:
        raise RuntimeError("head_size should be a multiple of 8, and at most 256")


def install() -> None:
    """From now on this process's CPU has the kernels."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    _registered.append(library)  # they go with it
