"""PyTorch's FSDP2: every rank has a share of the weights, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from async_rlhf.config import ParallelConfig
from async_rlhf.ranks.collectives import Ranks
from async_rlhf.ranks.parallel import Model, Parallel


class FullyShardedDataParallel(Parallel):
    """Weights, gradients and the optimiser's state spread over all ranks: FSDP2.

    Args:
        ranks: who shares them.
        config: offloading and resharding.
        device: of this rank.
    """

    spreads_weights, takes_optimizers = True, False

    def __init__(self, ranks: Ranks, config: ParallelConfig, device: torch.device) -> None:
        super().__init__(ranks)
        self.config = config
        self.device = device
        self._mesh: DeviceMesh = init_device_mesh(device.type, (ranks.count,))

    def prepare(
        self, model: nn.Module, parts: Sequence[nn.Module], make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        for part in parts:
            self._shard(part)
        return super().prepare(model, parts, make)

    def frozen(self, model: Model) -> Model:
        self._shard(model)
        return model

    def _shard(self, model: nn.Module) -> None:
        """Block by block, so that only one block's weights are whole at a time."""
        offload = self.config.cpu_offload and self._mesh.device_type != "cpu"  # where else would they be
        blocks = set(getattr(model, "_no_split_modules", None) or [])
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": self.config.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        for module in list(model.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        if isinstance(model, PreTrainedModel) and not model.can_generate():
            # Scores and values are read by calling body and head, each by itself.
            for child in model.children():
                fully_shard(child, **options)
        else:
            fully_shard(model, **options)

    def architecture_of(self, model: nn.Module) -> type[Any]:
        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return self.whole(norm).item()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def share(self, number: int, tensor: Tensor) -> Tensor:
        like = self.trained[number]
        if not isinstance(like, DTensor) or tensor.shape != like.shape:  # such as the number of steps
            return tensor
        tensor = tensor.to(like.device)
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

    def settle(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def exchange(self, parameter: nn.Parameter, tensor: Tensor | None) -> Callable[[], Any]:
        assert isinstance(parameter, DTensor)
        mine, mesh = parameter.to_local(), parameter.device_mesh
        before = mine.clone()
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
        if tensor is not None:
            whole.copy_(tensor)
        mine.copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
        return partial(mine.copy_, before)
