"""How far the policy being trained is from the behaviour policy: policy lag plus engine noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from async_rlhf.algorithms.ratios import ratio_statistics
from async_rlhf.types import Experience, PolicyOutput


class RatioMonitor:
    """Collects the ratios of one update's micro-batches. Every rank has one for its share."""

    def __init__(self) -> None:
        self._token_entropies: list[Tensor] = []
        self._token_log_ratios: list[Tensor] = []
        self._row_log_ratios: list[Tensor] = []

    @classmethod
    def of(cls, parts: Sequence[RatioMonitor]) -> RatioMonitor:
        """One monitor with the data of several."""
        whole = cls()
        for part in parts:
            whole._token_entropies += part._token_entropies
            whole._token_log_ratios += part._token_log_ratios
            whole._row_log_ratios += part._row_log_ratios
        return whole

    def add(self, output: PolicyOutput, rows: Experience) -> None:
        """Add the rows of one micro-batch."""
        mask_BT = rows.sampled_BT
        log_ratios_BT = (output.logprobs_BT.detach() - rows.behaviour_logprobs_BT) * mask_BT
        self._token_entropies.append(output.entropies_BT[mask_BT.bool()].cpu())
        self._token_log_ratios.append(log_ratios_BT[mask_BT.bool()].cpu())
        self._row_log_ratios.append(log_ratios_BT.sum(dim=1).cpu())

    def metrics(self) -> dict[str, float]:
        """Entropy, and statistics of the ratios of tokens and of whole completions.

        Means weight all tokens equally. A mean over rows of row means would give more weight to tokens of short rows,
        and its ratio would not be 1 where 1 is expected.
        """
        if not any(map(len, self._token_log_ratios)):
            return {}
        entropy = torch.cat(self._token_entropies).double().mean().item()
        statistics = ratio_statistics(torch.cat(self._token_log_ratios), torch.cat(self._row_log_ratios))
        return {"policy/entropy_avg": entropy, **statistics}
