"""Faults in how a learner holds memory, each of which a test must find."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from fake_rank import Ledger, Peak
from memory import Case, measure

from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel


def logits_are_kept(case: Case) -> dict[str, Peak]:
    """Float32 logits of an update stay until its end, in any chunks."""
    kept, see = [], Ledger.see

    def keep(ledger: Ledger, tensor: torch.Tensor, *args: Any) -> None:
        see(ledger, tensor, *args)
        if tensor.dtype == torch.float32 and ledger.kind_of(tensor) == "logits":
            kept.append(tensor)

    with patch.object(Ledger, "see", keep):
        return measure(case)


def gathered_weights_are_kept(case: Case) -> dict[str, Peak]:
    """What publishing has gathered is not freed."""
    kept, whole = [], FullyShardedDataParallel.whole

    def keep(parallel: FullyShardedDataParallel, tensor: torch.Tensor) -> torch.Tensor:
        kept.append(whole(parallel, tensor))
        return kept[-1]

    with patch.object(FullyShardedDataParallel, "whole", keep):
        return measure(case)
