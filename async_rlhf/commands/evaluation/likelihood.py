"""How likely responses are under a model: the basis of evaluation loss, perplexity and KL.

B  rows of a pass   T  tokens of a row   N  response tokens of a pass
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.generation.sampling import Distribution, truncated
from async_rlhf.models.forward import evaluating, over_response_logits
from async_rlhf.models.head import selected_logprobs
from async_rlhf.models.rows import by_length, in_shares, pad_rows


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A prompt and its response, as tokens."""

    tokens: tuple[int, ...]
    start: int
    """Index of the first response token; 0 if all tokens count. Token 0 itself is never predicted."""
    learnt: tuple[int, ...] = ()
    """1 for each token from ``start`` on that counts, else 0; empty if all of these do."""

    @property
    def targets(self) -> int:
        """Tokens that are predicted."""
        return sum(self.learnt) if self.learnt else len(self.tokens) - max(self.start, 1)


def row_tensors(rows: Sequence[EncodedRow]) -> tuple[Tensor, Tensor]:
    """Tokens (B, T), padded on the right with 0, and the bool mask (B, T) of the response tokens."""
    tokens_BT = pad_rows([row.tokens for row in rows], torch.long)
    positions_T = torch.arange(tokens_BT.shape[1])
    starts_B = torch.tensor([max(row.start, 1) for row in rows])
    lengths_B = torch.tensor([len(row.tokens) for row in rows])
    mask_BT = (positions_T >= starts_B[:, None]) & (positions_T < lengths_B[:, None])
    for mask_T, row in zip(mask_BT, rows, strict=True):
        if row.learnt:
            mask_T[row.start : len(row.tokens)] &= torch.tensor(row.learnt, dtype=torch.bool)
    return tokens_BT, mask_BT


@torch.no_grad()
def response_logprob_sums(
    model: PreTrainedModel,
    rows: Sequence[EncodedRow],
    *,
    temperature: float,
    batch_size: int,
    progress: Callable[[int], None] | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    parallel: Parallel = ALONE,
) -> Tensor:
    """Log-probability of each row's response, summed over its tokens.

    Args:
        model: a causal language model.
        rows: any number.
        temperature: logits are divided by it.
        batch_size: rows of one forward pass.
        progress: called with the number of rows done so far.
        top_p: see :class:`~async_rlhf.generation.sampling.Distribution`.
        top_k: the same.
        parallel: the ranks that share the passes. Every one must call it, and gets the whole result.

    Returns:
        One float64 number per row, on the CPU. Logits and log-softmax are float32.
    """
    distribution, device = Distribution(temperature, top_p, top_k), parallel.device_of(model)
    ranks, done = parallel.ranks, 0

    def sums(index_B: Tensor) -> Tensor:
        nonlocal done
        tokens_BT, mask_BT = row_tensors([rows[i] for i in index_B.tolist()])
        tokens_BT, device_mask_BT = tokens_BT.to(device), mask_BT.to(device)
        tokens_N = tokens_BT[device_mask_BT]

        def logprobs(logits_CV: Tensor, part: slice) -> Tensor:
            logits_CV = truncated(logits_CV, distribution, tokens_N[part]) / temperature
            return selected_logprobs(logits_CV, tokens_N[part])[None]

        logprobs_N = over_response_logits(model, tokens_BT, device_mask_BT, logprobs)[0].double().cpu()
        done += len(index_B)
        if progress is not None:
            progress(min(done * ranks.count, len(rows)))
        return torch.zeros(len(index_B), dtype=torch.float64).index_add_(0, mask_BT.nonzero()[:, 0], logprobs_N)

    batches = list(by_length(torch.tensor([len(row.tokens) for row in rows]), batch_size))
    with evaluating(model):
        batch_sums = in_shares("log-probabilities", batches, sums, parallel)
    sums_R = torch.zeros(len(rows), dtype=torch.float64)
    for index_B, sums_B in zip(batches, batch_sums, strict=True):
        sums_R[index_B] = sums_B
    return sums_R


def loss_and_perplexity(
    model: PreTrainedModel, rows: Sequence[EncodedRow], batch_size: int, parallel: Parallel = ALONE
) -> tuple[float, float]:
    """Mean negative log-likelihood of a response token (nats, end of sequence counted), and e to that power.

    Prompt tokens are neither in the sum nor in the count. Every rank of ``parallel`` must call it.
    """
    sums_R = response_logprob_sums(model, rows, temperature=1.0, batch_size=batch_size, parallel=parallel)
    loss = -sums_R.sum().item() / sum(row.targets for row in rows)
    return loss, math.exp(loss)


def original_perplexity(sums_R: Tensor, rows: Sequence[EncodedRow]) -> float:
    """The number that the code of "Asynchronous RLHF" (arXiv 2410.18252) calls perplexity, to compare with its logs.

    It divides a response's negative log-likelihood by the predicted tokens of prompt and response together, and takes
    the mean over rows of e to that power: far below the perplexity, and lower the longer the prompts are.

    Args:
        sums_R: log-probability of each row's response, summed over its tokens, at temperature 1.
        rows: the same rows.
    """
    tokens_R = torch.tensor([len(row.tokens) - 1 for row in rows], dtype=torch.float64)
    return (-sums_R / tokens_R).exp().mean().item()
