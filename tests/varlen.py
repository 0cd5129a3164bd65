"""PyTorch's kernel for packed rows, emulated on a CPU: one operator that keeps what the kernel keeps, and counts."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

CALLS: Counter[str] = Counter()
READ: list[weakref.ref[Tensor]] = []
"""Keys and values that were read."""


def _scores(query: Tensor, key: Tensor, scale: float, back: int) -> Tensor:
    """(H, Q, K): the last query is at the last key, and sees so many keys before its own; all, if that is -1."""
    groups = query.shape[1] // key.shape[1]
    scores_HQK = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * scale
    behind_QK = torch.arange(len(key))[len(key) - len(query) :, None] - torch.arange(len(key))
    return scores_HQK.masked_fill((behind_QK < 0) | ((behind_QK > back) & (back >= 0)), -torch.inf)


def _parts(starts: Tensor, key_starts: Tensor) -> list[tuple[slice, slice]]:
    both = zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in both]


@torch.library.custom_op("tests::varlen_attn", mutates_args=())
def forward_kernel(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, scale: float, back: int
) -> tuple[Tensor, Tensor]:
    CALLS["forward"] += 1
    READ.extend(map(weakref.ref, (key, value)))
    out_NHD, sums_HN = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for q, k in _parts(starts, key_starts):
        scores_HQK = _scores(query[q], key[k], scale, back)
        sums_HN[:, q] = scores_HQK.logsumexp(-1)
        values = value[k].repeat_interleave(query.shape[1] // key.shape[1], 1)
        out_NHD[q] = torch.einsum("hqk,khd->qhd", scores_HQK.softmax(-1), values)
    return out_NHD, sums_HN


@forward_kernel.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[1], len(query))


@torch.library.custom_op("tests::varlen_attn_backward", mutates_args=())
def backward_kernel(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    scale: float,
    back: int,
) -> tuple[Tensor, Tensor, Tensor]:
    CALLS["backward"] += 1
    groups, shape = query.shape[1] // key.shape[1], (len(key), *query.shape[1:])
    found = torch.zeros_like(query), key.new_zeros(shape), key.new_zeros(shape)
    for q, k in _parts(starts, key_starts):
        keys, values = (each[k].repeat_interleave(groups, 1) for each in (key, value))
        shares_HQK = (_scores(query[q], key[k], scale, back) - sums[:, q, None]).exp()
        passed_HQK = torch.einsum("qhd,khd->hqk", gradient[q], values)
        passed_HQK = shares_HQK * (passed_HQK - (gradient[q] * out[q]).sum(-1).T[..., None]) * scale
        found[0][q] = torch.einsum("hqk,khd->qhd", passed_HQK, keys)
        found[1][k] = torch.einsum("hqk,qhd->khd", passed_HQK, query[q])
        found[2][k] = torch.einsum("hqk,qhd->khd", shares_HQK, gradient[q])
    return found


@backward_kernel.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (len(key), *query.shape[1:])
    return torch.empty_like(query), key.new_empty(shape), value.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, key_starts, ctx.scale, ctx.back = inputs
    ctx.save_for_backward(query, key, value, *output, starts, key_starts)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """FlashAttention's, too, are first of all query heads, and then summed to those of keys."""
    query, key, *rest = ctx.saved_tensors
    groups = query.shape[1] // key.shape[1]
    of_query, *heads = backward_kernel(gradient.contiguous(), query, key, *rest, ctx.scale, ctx.back)
    of_key, of_value = (each.unflatten(1, (-1, groups)).sum(2) if groups > 1 else each for each in heads)
    return (of_query, of_key, of_value, None, None, None, None)


forward_kernel.register_autograd(_gradients, setup_context=_keep)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn, as far as the package calls it."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return forward_kernel(query, key, value, starts, key_starts, scale, window_size[0])[0]
