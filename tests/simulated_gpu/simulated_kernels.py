"""PyTorch's kernel for packed rows, on a CPU: the operators behind ``varlen_attn``, row by row in float32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

CALLS: Counter[str] = Counter()
"""How often attention was computed since the process began: "forward" and "backward"."""
_registered: list[torch.library.Library] = []


def _rows(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor, causal: bool, left: Any, right: Any) -> Any:
    """For each row: where its queries are, where its keys are, and which of them are hidden (Q, K)."""
    queries, keys = starts_q.tolist(), starts_k.tolist()
    for i in range(len(queries) - 1):
        at_q, at_k = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        wide, long = at_q.stop - at_q.start, at_k.stop - at_k.start
        places_Q = torch.arange(long - wide, long)[:, None]  # the last query is the last key's
        places_K = torch.arange(long)[None, :]
        hidden_QK = torch.zeros(wide, long, dtype=torch.bool)
        if causal or (right is not None and right >= 0):
            hidden_QK |= places_K > places_Q + (0 if causal else right)
        if left is not None and left >= 0:
            hidden_QK |= places_K < places_Q - left
        yield at_q, at_k, hidden_QK


def _heads(packed_THD: Tensor, at: slice, times: int = 1) -> Tensor:
    return packed_THD[at].transpose(0, 1).float().repeat_interleave(times, dim=0)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int,
    dropout: float, causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    require_as_the_kernel_does(query, key, value, starts_q, starts_k)
    CALLS["forward"] += 1
    times, scale = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    out_THD, lse_HT = torch.zeros_like(query), torch.zeros(query.shape[1], query.shape[0])
    for at_q, at_k, hidden_QK in _rows(query, key, starts_q, starts_k, causal, window_size_left, window_size_right):
        scores_HQK = (_heads(query, at_q) @ _heads(key, at_k, times).mT * scale).masked_fill(hidden_QK, -torch.inf)
        out_THD[at_q] = (scores_HQK.softmax(-1) @ _heads(value, at_k, times)).transpose(0, 1).to(query.dtype)
        lse_HT[:, at_q] = scores_HQK.logsumexp(-1)
    empty = torch.zeros(0)
    return out_THD, lse_HT, torch.zeros(2, dtype=torch.uint64), empty, empty


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse_HT: Tensor, starts_q: Tensor,
    starts_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, rng: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    require_as_the_kernel_does(query, key, value, starts_q, starts_k)
    CALLS["backward"] += 1
    times, scale = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    grads = [torch.zeros(tensor.shape) for tensor in (query, key, value)]
    for at_q, at_k, hidden_QK in _rows(query, key, starts_q, starts_k, causal, window_size_left, window_size_right):
        q_HQD, k_HKD, v_HKD = _heads(query, at_q), _heads(key, at_k, times), _heads(value, at_k, times)
        grad_HQD = _heads(grad, at_q)
        scores_HQK = (q_HQD @ k_HKD.mT * scale).masked_fill(hidden_QK, -torch.inf)
        shares_HQK = (scores_HQK - lse_HT[:, at_q, None]).exp()
        row_HQ1 = (grad_HQD * _heads(out, at_q)).sum(-1, keepdim=True)
        inner_HQK = shares_HQK * (grad_HQD @ v_HKD.mT - row_HQ1) * scale
        grads[0][at_q] += (inner_HQK @ k_HKD).transpose(0, 1)
        grads[1][at_k] += (inner_HQK.mT @ q_HQD).unflatten(0, (-1, times)).sum(1).transpose(0, 1)
        grads[2][at_k] += (shares_HQK.mT @ grad_HQD).unflatten(0, (-1, times)).sum(1).transpose(0, 1)
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


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
