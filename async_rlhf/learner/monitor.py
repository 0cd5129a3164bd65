"""How far the policy being trained is from the behaviour policy: policy lag plus engine noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from async_rlhf.algorithms.estimators import ratio_statistics
from async_rlhf.types import Experience, PolicyOutput


class ImportanceRatioStats:
    """Collects the ratios of one update's micro-batches. Every rank has one for its share.

    They stay on the learner's device until :meth:`on_cpu`, so that the host need not wait for it in between.
    """

    def __init__(self, parts: Iterable[tuple[Tensor, ...]] = ()) -> None:
        self._parts = list(parts)
        """Of each part entropies, log-ratios, those of rows, and which tokens were sampled, the latter on the CPU."""

    @classmethod
    def of(cls, parts: Sequence[ImportanceRatioStats]) -> ImportanceRatioStats:
        """One monitor with the data of several."""
        return cls(one for part in parts for one in part._parts)

    def add(self, output: PolicyOutput, rows: Experience, sampled_BT: Tensor) -> None:
        """Add the rows of one micro-batch; ``sampled_BT`` is theirs, on the CPU."""
        log_ratios_BT = (output.logprobs_BT.detach() - rows.behaviour_logprobs_BT) * rows.sampled_BT
        of_tokens = output.entropies_BT.flatten(), log_ratios_BT.flatten()
        self._parts.append((*of_tokens, log_ratios_BT.sum(dim=1), sampled_BT.bool().flatten()))

    def on_cpu(self) -> ImportanceRatioStats:
        """The same as one part on the CPU, where it can be sent to other ranks; none of none."""
        kinds = list(zip(*self._parts, strict=True))
        return ImportanceRatioStats([tuple(torch.cat(each).cpu() for each in kinds)] if kinds else [])

    def metrics(self) -> dict[str, float]:
        """Entropy, and statistics of the ratios of tokens and of whole completions.

        Means weight all tokens equally. A mean over rows of row means would give more weight to tokens of short rows,
        and its ratio would not be 1 where 1 is expected.
        """
        for entropies_N, log_ratios_N, row_log_ratios_B, sampled_N in self.on_cpu()._parts:
            if sampled_N.any():
                entropy = entropies_N[sampled_N].double().mean().item()
                return {"policy/entropy_avg": entropy, **ratio_statistics(log_ratios_N[sampled_N], row_log_ratios_B)}
        return {}
