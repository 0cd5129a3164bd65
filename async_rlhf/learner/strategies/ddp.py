"""PyTorch's DDP: every rank has all weights, and a share of the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from async_rlhf.distributed.parallel import Parallel


class DataParallel(Parallel):
    """All of the weights on every rank, and gradients that meet while they are computed: DDP."""

    def prepare(
        self, model: nn.Module, parts: Sequence[nn.Module], make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)  # held once, if a step has one pass
        return super().prepare(self._ddp, parts, make)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._ddp.no_sync()
