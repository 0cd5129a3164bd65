"""How far the policy being trained is from the behaviour policy: policy lag plus engine noise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from async_rlhf.algorithms.ratios import ratio_statistics
from async_rlhf.types import Experience, PolicyOutput


class ImportanceRatioStats:
    """Collects the ratios of one update's micro-batches. Every rank has one for its share.

    They stay on the learner's device until :meth:`on_cpu`, so that the host need not wait for it in between.
    """

    def __init__(self) -> None:
        self._entropies: list[Tensor] = []
        self._log_ratios: list[Tensor] = []
        self._row_log_ratios: list[Tensor] = []
        self._sampled: list[Tensor] = []
        """Which tokens were sampled, on the CPU."""

    @classmethod
    def of(cls, parts: Sequence[ImportanceRatioStats]) -> ImportanceRatioStats:
        """One monitor with the data of several."""
        whole = cls()
        for part in parts:
            whole._entropies += part._entropies
            whole._log_ratios += part._log_ratios
            whole._row_log_ratios += part._row_log_ratios
            whole._sampled += part._sampled
        return whole

    def add(self, output: PolicyOutput, rows: Experience, sampled_BT: Tensor) -> None:
        """Add the rows of one micro-batch; ``sampled_BT`` is theirs, on the CPU."""
        log_ratios_BT = (output.logprobs_BT.detach() - rows.behaviour_logprobs_BT) * rows.sampled_BT
        self._entropies.append(output.entropies_BT.flatten())
        self._log_ratios.append(log_ratios_BT.flatten())
        self._row_log_ratios.append(log_ratios_BT.sum(dim=1))
        self._sampled.append(sampled_BT.bool().flatten())

    def on_cpu(self) -> ImportanceRatioStats:
        """The same on the CPU, where it can be sent to other ranks."""
        moved = ImportanceRatioStats()
        if self._sampled:
            moved._entropies = [torch.cat(self._entropies).cpu()]
            moved._log_ratios = [torch.cat(self._log_ratios).cpu()]
            moved._row_log_ratios = [torch.cat(self._row_log_ratios).cpu()]
            moved._sampled = [torch.cat(self._sampled)]
        return moved

    def metrics(self) -> dict[str, float]:
        """Entropy, and statistics of the ratios of tokens and of whole completions.

        Means weight all tokens equally. A mean over rows of row means would give more weight to tokens of short rows,
        and its ratio would not be 1 where 1 is expected.
        """
        whole = self.on_cpu()
        if not any(sampled.any() for sampled in whole._sampled):
            return {}
        sampled = whole._sampled[0]
        entropy = whole._entropies[0][sampled].double().mean().item()
        statistics = ratio_statistics(whole._log_ratios[0][sampled], whole._row_log_ratios[0])
        return {"policy/entropy_avg": entropy, **statistics}
