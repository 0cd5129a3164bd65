"""Forward passes on rows: log-probabilities of responses, scores of a reward model.

Rows are padded on the right, so that under causal attention no real token ever sees padding: no attention mask and
no position ids are needed, and any causal language model of transformers works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.objectives.logprobs import entropies, selected_logprobs
from async_rlhf.rows import by_length, pad_rows


@contextmanager
def _logits_at(model: PreTrainedModel, mask_BT: Tensor) -> Iterator[None]:
    """Within, the model's head sees only the hidden states at ``mask_BT``: logits come out as (N, V).

    The head is the largest matrix of many models and its output the largest tensor; prompts and padding need none.
    """
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _module, inputs: (inputs[0][mask_BT],))
    try:
        yield
    finally:
        handle.remove()


def response_logits(model: PreTrainedModel, tokens_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Logits that predict the response tokens, in the order of ``tokens_BT[response_mask_BT]``.

    Args:
        model: any causal language model.
        tokens_BT: rows of prompt and response, padded on the right.
        response_mask_BT: nonzero at response tokens. The first token of a row cannot be one.

    Returns:
        (N, V) float32 for the N response tokens.
    """
    # The logits that predict token t stand at t - 1.
    predicts_BT = torch.zeros_like(response_mask_BT, dtype=torch.bool)
    predicts_BT[:, :-1] = response_mask_BT[:, 1:].bool()
    with _logits_at(model, predicts_BT):
        logits_NV = model(input_ids=tokens_BT, use_cache=False).logits
    return logits_NV.reshape(-1, logits_NV.shape[-1]).float()


def response_logprobs(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    response_mask_BT: Tensor,
    temperature: float,
    with_entropies: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each response token, and the entropy of the distribution it was drawn from.

    Args:
        model: any causal language model.
        tokens_BT: rows of prompt and response, padded on the right.
        response_mask_BT: nonzero at response tokens. The first token of a row cannot be one.
        temperature: logits are divided by it.
        with_entropies: False saves their computation and returns zeros in their place.

    Returns:
        Two (B, T) float32 tensors, 0 outside the response. The entropy, in nats, carries no gradient.
    """
    logits_NV = response_logits(model, tokens_BT, response_mask_BT) / temperature
    response_BT = response_mask_BT.bool()
    shape = response_mask_BT.shape
    empty_BT = torch.zeros(shape, dtype=torch.float32, device=logits_NV.device)
    logprobs_BT = empty_BT.masked_scatter(response_BT, selected_logprobs(logits_NV, tokens_BT[response_BT]))
    if not with_entropies:
        return logprobs_BT, empty_BT
    with torch.no_grad():
        entropies_BT = empty_BT.masked_scatter(response_BT, entropies(logits_NV))
    return logprobs_BT, entropies_BT


def reward_scores(model: PreTrainedModel, tokens_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Score of each row, read at its last real token.

    Args:
        model: a sequence-classification model with a linear head named ``score`` (as all of transformers' decoder
            models have) and one output.
        tokens_BT: rows of prompt and response, padded on the right.
        lengths_B: real tokens of each row.

    Returns:
        (B,) float32.
    """
    head = model.score
    hidden_BTH = model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
    last_BH = hidden_BTH[torch.arange(len(lengths_B), device=hidden_BTH.device), lengths_B - 1]
    # In bfloat16 a score near 4 has a step of 0.03: real preferences would become ties.
    with torch.autocast(hidden_BTH.device.type, enabled=False):
        return head(last_BH.to(head.weight.dtype)).squeeze(-1).float()


@torch.no_grad()
def score_rows(model: PreTrainedModel, rows: Sequence[tuple[int, ...]], batch_size: int, bf16: bool = False) -> Tensor:
    """Scores of rows of any lengths, in batches of like length.

    Equal rows are scored once: rounding depends on the padding beside a row, and equal completions must tie.

    Returns:
        (len(rows),) float32 on the CPU.
    """
    number = {row: i for i, row in enumerate(dict.fromkeys(rows))}
    unique = list(number)
    lengths_B = torch.tensor([len(row) for row in unique])
    scores_B = torch.zeros(len(unique))
    for index in by_length(lengths_B, batch_size):
        tokens_BT = pad_rows([unique[i] for i in index.tolist()], torch.long).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            scores_B[index] = reward_scores(model, tokens_BT, lengths_B[index].to(model.device)).cpu()
    return scores_B[torch.tensor([number[row] for row in rows])]
