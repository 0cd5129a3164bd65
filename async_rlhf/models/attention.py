"""Attention by PyTorch, for models of transformers: of rows as they are, of a forest, and of rows with shared keys.

It takes the place of transformers' "sdpa". A model's forward pass hands on what it is called with: so its layers learn
which tokens are a branch, or which keys and values rows share.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from async_rlhf.models.forest import Forest

KIND = "sdpa"
"""What transformers calls the attention that is replaced."""
_Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values: (B, H, T, D)."""
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Prefixes(Protocol):
    """Keys and values that rows share: :class:`~async_rlhf.generation.decode_cache.Prefixes`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, /
    ) -> Tensor:
        """Attention of a token of each row."""


def _attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    forest: Forest | None = None,
    prefixes: Prefixes | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention by PyTorch; the same for packed rows, for those that ranks share, and for a token of rows
    that go on from shared keys and values (generation/decode_cache.py).
    """
    heads = query_BHTD, key_BHTD, value_BHTD
    if prefixes is not None:
        if options.get("sliding_window") or options.get("softcap"):
            raise NotImplementedError("attention with a window or a cap does not read keys and values that rows share")
        layer: Any = module
        scale = options.get("scaling") or query_BHTD.shape[-1] ** -0.5
        return prefixes.attend(layer.layer_idx, *heads, attention_mask, scale), None
    if forest is None:
        return _in_one_call(module, *heads, attention_mask, **options), None
    window = options.pop("sliding_window", None) or None  # some models say 0 for none
    if torch.is_autocast_enabled(query_BHTD.device.type):  # casts for its own operations alone, the kernel is not one
        dtype = torch.get_autocast_dtype(query_BHTD.device.type)
        heads = query_BHTD.to(dtype), key_BHTD.to(dtype), value_BHTD.to(dtype)
    if forest.context.size > 1:
        return _exchanged(module, heads, forest, sliding_window=window, **options), None
    if len(query_BHTD) == 1 and _has_kernel(heads[0], heads[2]) and options.get("softcap") is None:
        query, key, value = (part.squeeze(0).transpose(0, 1) for part in heads)
        sees, grouped = (-1 if window is None else window - 1, 0), query.shape[1] != key.shape[1]
        attend = partial(_by_kernel, forest, scale=options.get("scaling"), window_size=sees, enable_gqa=grouped)
        if forest.keys is not None and torch.is_grad_enabled():
            # What is copied is larger than what it is copied from: it is copied again rather than kept.
            return checkpoint(attend, query, key, value, use_reentrant=False)[None], None
        return attend(query, key, value)[None], None
    return _in_calls(module, heads, forest, window, **options), None


def _by_kernel(forest: Forest, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention (N, H, D) in one call. The last query of a branch is at its last key: so a window counts positions."""
    if forest.keys is not None:
        key, value = key[forest.keys], value[forest.keys]
    bounds = (forest.starts, forest.key_starts, forest.longest, forest.longest_keys)
    out_NHD = varlen_attn(query, key, value, *bounds, **options)
    assert isinstance(out_NHD, Tensor)  # more only if asked for
    return out_NHD


@torch.compiler.disable  # nothing is gained: what surrounds the exchange is attention's own kernel
def _exchanged(module: nn.Module, heads: _Heads, forest: Forest, **options: Any) -> Tensor:
    """Attention (B, T / C, H, D) of this rank's part of the sequence: that of its part of the heads, exchanged."""
    context, (query, key, value) = forest.context, heads
    query, key, value = map(context.exchanged, (query, context.repeated(key), context.repeated(value)))
    out = _attention(module, query, key, value, None, forest.whole, **options)[0]
    return context.exchanged(out)


@torch.compiler.disable  # it would be unrolled
def _in_calls(module: Any, heads: _Heads, forest: Forest, window: int | None, **options: Any) -> Tensor:
    """Attention (B, N, H, D), a few branches at a time."""
    groups = heads[0].shape[1] // heads[1].shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:  # key heads that ranks repeat have fewer queries
        module = SimpleNamespace(num_key_value_groups=groups, is_causal=getattr(module, "is_causal", True))
    lengths, cuts, found = [call.length for call in forest.calls], forest.cuts, []
    # Split once: the gradient of each slice would be as large as the whole.
    sizes = [stop - start for start, stop in pairwise(cuts)]
    outside = [part.split(sizes, dim=2) if len(cuts) > 2 else () for part in heads[1:]]
    for number, (query, *own) in enumerate(zip(*(part.split(lengths, dim=2) for part in heads), strict=True)):
        if pieces := forest.pieces(forest.calls[number]):
            own = [torch.cat([*(part[n] for n in pieces), last], 2) for part, last in zip(outside, own, strict=True)]
        mask = forest.mask(number, window, query.dtype)
        found.append(_in_one_call(module, query, own[0], own[1], mask, **options))
    return torch.cat(found, dim=1)  # of one, too: compiled code distinguishes views


def _in_one_call(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    softcap: float | None = None,
    **options: Any,
) -> Tensor:
    """Attention (B, T, H, D). transformers' function leaves out a soft cap on the scores, which Gemma 2 has."""
    if softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    heads, (length, keys) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    key, value = (part.repeat_interleave(heads, dim=1) for part in (key, value))
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    scores_BHTS = softcap * torch.tanh(query @ key.mT * (scale / softcap))
    if mask is None and length > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    if mask is not None:
        hidden = torch.finfo(scores_BHTS.dtype).min
        scores_BHTS = scores_BHTS.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores_BHTS + mask
    exact = torch.promote_types(scores_BHTS.dtype, torch.float32)
    return (scores_BHTS.softmax(dim=-1, dtype=exact).to(value.dtype) @ value).transpose(1, 2)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch can compute attention of all packed rows at once."""
    size = query.shape[-1]
    fits = size == value.shape[-1] and size % 8 == 0 and size <= 256
    return fits and query.dtype in _SIXTEEN_BITS and runs_kernel(query.device)


def runs_kernel(device: torch.device) -> bool:
    """Whether PyTorch has its kernel for packed rows there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


AttentionInterface.register(KIND, _attention)
