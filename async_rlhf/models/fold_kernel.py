"""The checksum of :func:`~async_rlhf.models.weights.fold` in one kernel of a GPU, which reads every word once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_PROGRAMS = 1024
"""Enough to fill a GPU. Each takes one block after the other and adds its sums at the end, in any order."""


def fold_words(words_N: Tensor, keys: tuple[int, int], factors: tuple[int, int]) -> Tensor:
    """The two sums, (2,) int64, computed in the current stream of the words' GPU.

    Args:
        words_N: int64, one after the other in memory.
        keys: from which the multipliers of places are made, for each sum.
        factors: of the finaliser.
    """
    found_2 = torch.zeros(2, dtype=torch.int64, device=words_N.device)
    programs = min(triton.cdiv(len(words_N), _BLOCK), _PROGRAMS)
    if programs:
        with torch.cuda.device_of(words_N):  # Triton launches on the current GPU
            _fold[(programs,)](words_N, found_2, len(words_N), *keys, *factors, BLOCK=_BLOCK, num_warps=8)
    return found_2


@triton.jit(do_not_specialize=["count"])  # one kernel for all tensors
def _fold(
    words: tl.tensor,
    totals: tl.tensor,
    count: tl.int64,  # it may be above 2^31
    KEY_0: tl.constexpr,
    KEY_1: tl.constexpr,
    FACTOR_0: tl.constexpr,
    FACTOR_1: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    sums_0 = tl.zeros((BLOCK,), tl.int64)
    sums_1 = tl.zeros((BLOCK,), tl.int64)
    within = tl.arange(0, BLOCK).to(tl.int64)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        offsets = start + within
        mixed = _mixed(tl.load(words + offsets, mask=offsets < count, other=0), FACTOR_0, FACTOR_1)  # 0 adds 0
        sums_0 += mixed * (_mixed((offsets + 1) * KEY_0, FACTOR_0, FACTOR_1) | 1)
        sums_1 += mixed * (_mixed((offsets + 1) * KEY_1, FACTOR_0, FACTOR_1) | 1)
    tl.atomic_add(totals, tl.sum(sums_0))
    tl.atomic_add(totals + 1, tl.sum(sums_1))


@triton.jit
def _mixed(words: tl.tensor, FACTOR_0: tl.constexpr, FACTOR_1: tl.constexpr) -> tl.tensor:
    words = (words ^ (words >> 33 & 0x7FFFFFFF)) * FACTOR_0
    words = (words ^ (words >> 33 & 0x7FFFFFFF)) * FACTOR_1
    return words ^ (words >> 33 & 0x7FFFFFFF)
