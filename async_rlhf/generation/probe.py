"""A probe of the weights: fixed sequences whose log-probabilities in generator and learner must agree.

Checksums prove that the right numbers arrived; the probe proves that the engine computes with them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.models.forward import response_logprobs
from async_rlhf.ranks.parallel import ALONE, Parallel

ROWS, LENGTH = 4, 16


def probe_tokens(vocabulary: int) -> Tensor:
    """The sequences, (ROWS, LENGTH), drawn once for all from the vocabulary."""
    return torch.randint(vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def probe_logprobs(
    model: PreTrainedModel, autocast: torch.dtype | None = None, parallel: Parallel = ALONE
) -> list[float]:
    """Log-probability of each token of :func:`probe_tokens` except the first of each sequence.

    Args:
        model: the policy, wherever it runs.
        autocast: compute in this type.
        parallel: how its weights are sharded over ranks; every rank must compute.
    """
    parallel.meet("probing", model)
    device = parallel.device_of(model)
    tokens_BT = probe_tokens(model.get_input_embeddings().num_embeddings).to(device)
    mask_BT = torch.ones(ROWS, LENGTH, device=device)
    mask_BT[:, 0] = 0
    training = model.training
    model.eval()
    try:
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            output = response_logprobs(model, tokens_BT, mask_BT, 1.0, with_entropies=False)
    finally:
        model.train(training)
    return output.logprobs_BT[mask_BT.bool()].tolist()


def differences(left: list[float], right: list[float]) -> Tensor:
    """Absolute difference of each token, (N,) float64.

    Raises:
        ValueError: one has more tokens than the other.
    """
    if len(left) != len(right):
        raise ValueError(f"need log-probabilities of as many tokens; got {len(left)} and {len(right)}")
    return (torch.tensor(left, dtype=torch.float64) - torch.tensor(right, dtype=torch.float64)).abs()
