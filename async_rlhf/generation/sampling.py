"""Counter-based random numbers, the distributions that tokens are drawn from, and drawing tokens with them.

The number for a row depends only on (seed, draw, sample, position), not on batch composition, worker count or timing.
This makes an asynchronous run repeatable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rlhf.system.determinism import cumulative_sums
from async_rlhf.types import Prompt, Turn

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

CPU_BLOCK = 2**18
"""Probabilities that a CPU handles at a time: few enough to stay in its caches from one pass to the next."""


def philox(counter: Sequence[np.ndarray], key: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Args:
        counter: four arrays of 32-bit words (as uint64) that broadcast together.
        key: two 32-bit words.

    Returns:
        Four arrays of random 32-bit words, as uint64.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.uint64(word) for word in key)
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = ((product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW)
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def row_uniforms(seed: int, prompts: Sequence[Prompt], samples: int, positions: int) -> np.ndarray:
    """One number in [0, 1) for each (prompt, sample, position): float64, shape (P, K, positions). Those of a turn begin
    with its sample and its offset.
    """
    first = [(each.sample, each.offset) if isinstance(each, Turn) else (0, 0) for each in prompts]
    draw_P, first_P2 = np.array([prompt.draw for prompt in prompts], dtype=np.uint64), np.array(first, dtype=np.uint64)
    sample_PK1 = first_P2[:, :1, None] + np.arange(samples, dtype=np.uint64)[None, :, None]
    return _uniforms(
        seed, draw_P[:, None, None], sample_PK1, first_P2[:, 1:, None] + np.arange(positions, dtype=np.uint64)
    )


def sample_uniforms(seed: int, draw: int, sample: int, positions: np.ndarray) -> np.ndarray:
    """The numbers that :func:`row_uniforms` gives one sample at some positions: float64, shape (len(positions),)."""
    return _uniforms(seed, np.array([draw], dtype=np.uint64), np.array([sample], dtype=np.uint64), positions)


def auditing_uniforms(seed: int, draw: int, sample: int, positions: np.ndarray) -> np.ndarray:
    """Similar numbers that draw no sample, for tests of the samples."""
    return sample_uniforms(seed, draw, sample | 1 << 31, positions)


def _uniforms(seed: int, draws: np.ndarray, samples: np.ndarray, positions: np.ndarray) -> np.ndarray:
    counter = np.broadcast_arrays(positions.astype(np.uint64), samples, draws & _LOW, draws >> _32)
    high, low, _, _ = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return ((high >> np.uint64(5)) * 67108864.0 + (low >> np.uint64(6))) / 9007199254740992.0  # 53 bits


def request_seeds(seed: int, prompts: Sequence[Prompt]) -> list[int]:
    """A 62-bit seed for each prompt, for engines with random numbers of their own; it depends only on (seed, draw), and
    of a turn on its sample and offset.
    """
    draw_P = np.array([prompt.draw for prompt in prompts], dtype=np.uint64)
    # Sample numbers that row_uniforms never reaches.
    of = [(each.offset, each.sample + 1) if isinstance(each, Turn) else (0, 0) for each in prompts]
    offset_P, below_P = np.array(of, dtype=np.uint64).reshape(-1, 2).T
    counter = np.broadcast_arrays(offset_P, _LOW - below_P, draw_P & _LOW, draw_P >> _32)
    high, low, _, _ = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    return ((high >> np.uint64(2) << _32) | low).tolist()


def draw_tokens(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at the given number.

    Args:
        logits_BV: raw logits.
        uniforms_B: float64 in [0, 1).
        temperature: logits are divided by it.

    Returns:
        Token ids (B,) and their float32 log-probabilities (B,) under the scaled distribution.
    """
    rows = max(1, CPU_BLOCK // logits_BV.shape[-1]) if logits_BV.device.type == "cpu" else len(logits_BV)
    drawn = [
        _draw_block(part_BV, part_B, temperature)
        for part_BV, part_B in zip(logits_BV.split(rows), uniforms_B.split(rows), strict=True)
    ]
    tokens, logprobs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw_block(logits_BV: Tensor, uniforms_B: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
    # Float64, and scaled by its last entry: the sum of 100k rounded probabilities is not exactly 1.
    cumulative_BV = cumulative_sums(logprobs_BV.exp().double())
    threshold_B1 = (uniforms_B * cumulative_BV[:, -1])[:, None]
    tokens_B1 = torch.searchsorted(cumulative_BV, threshold_B1, right=True).clamp_(max=logits_BV.shape[-1] - 1)
    return tokens_B1.squeeze(-1), logprobs_BV.gather(-1, tokens_B1).squeeze(-1)


class Places(NamedTuple):
    """Places of drawn tokens in the distributions that they were drawn from; each (N,) float32."""

    logprobs_N: Tensor
    below_N: Tensor
    """Probability of the tokens with smaller ids: the token's interval in a draw by inversion begins here."""
    likelier_N: Tensor
    """Probability of the tokens that are likelier."""
    as_likely_N: Tensor
    """Probability of the tokens that are equally likely, including itself."""


def places(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Places:
    """See :class:`Places`.

    Args:
        logits_NV: raw logits.
        tokens_N: ids of the drawn tokens.
        temperature: logits are divided by it.
    """
    rows = max(1, CPU_BLOCK // logits_NV.shape[-1])
    blocks = zip(logits_NV.split(rows), tokens_N.split(rows), strict=True)
    per_block = [_places_in_block(part_NV, part_N, temperature) for part_NV, part_N in blocks]
    return Places(*(torch.cat(parts) for parts in zip(*per_block, strict=True)))


def _places_in_block(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Places:
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    tokens_N1 = tokens_N[:, None]
    own_N1 = logprobs_NV.gather(-1, tokens_N1)
    probabilities_NV = logprobs_NV.exp()
    ids_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
    parts = [ids_V < tokens_N1, logprobs_NV > own_N1, logprobs_NV == own_N1]
    return Places(own_N1.squeeze(-1), *((probabilities_NV * part_NV).sum(dim=-1) for part_NV in parts))


class Distribution(NamedTuple):
    """What makes a distribution from logits. Log-probabilities are those of the distribution that results."""

    temperature: float
    """Logits are divided by it, before anything is cut off."""
    top_p: float = 1.0
    """Keep a token if those that are likelier have less than this probability together; 1 keeps all (Holtzman et al.,
    arXiv 1904.09751)."""
    top_k: int = 0
    """Keep only the tokens that are as likely as the k-th; 0 keeps all. What top_p cuts off is found among these."""

    @property
    def whole(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_p >= 1 and self.top_k == 0


def truncated(logits_NV: Tensor, distribution: Distribution, drawn_N: Tensor | None = None) -> Tensor:
    """Logits with minus infinity for every token that is cut off; the very same tensor if none is.

    Equally likely tokens are kept or cut off together, so the result does not depend on how ties are sorted.

    Args:
        logits_NV: raw logits, without temperature.
        distribution: what is kept.
        drawn_N: tokens that were drawn by an engine that rounds differently. They are kept, with all that are as
            likely: at the border, rounding decides.

    Returns:
        (N, V), of the type of the logits.
    """
    if distribution.whole:
        return logits_NV
    scaled_NV = logits_NV.float() / distribution.temperature
    sorted_NV = scaled_NV.sort(dim=-1, descending=True).values
    least_N1 = sorted_NV[:, -1:]
    if distribution.top_k > 0:
        kth = min(distribution.top_k, logits_NV.shape[-1]) - 1
        least_N1 = sorted_NV[:, kth, None]
    if distribution.top_p < 1:
        among_NV = sorted_NV.masked_fill(sorted_NV < least_N1, -torch.inf)
        probabilities_NV = among_NV.double().softmax(dim=-1)
        likelier_NV = cumulative_sums(probabilities_NV) - probabilities_NV
        last_N1 = (likelier_NV < distribution.top_p).sum(dim=-1, keepdim=True).clamp(min=1) - 1
        least_N1 = torch.maximum(least_N1, sorted_NV.gather(-1, last_N1))
    if drawn_N is not None:
        least_N1 = torch.minimum(least_N1, scaled_NV.gather(-1, drawn_N[:, None]))
    return logits_NV.masked_fill(scaled_NV < least_N1, -torch.inf)
