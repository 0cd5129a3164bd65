"""PyTorch's FSDP2: every rank has a share of the weights, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig, ParallelConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import Model, Parallel
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.kernels import blocks
from async_rlhf.models.sharded_loading import make_room, only_on_rank_0


class FullyShardedDataParallel(Parallel):
    """Weights, gradients and the optimiser's state spread over all ranks: FSDP2.

    With bf16 or fp16 the shards stay float32 and are cast before they are gathered, which halves the traffic; gradients
    are summed over ranks in float32. Autocast then finds nothing to cast, and so keeps no second copy of any weight.

    Args:
        ranks: who shares them.
        config: offloading and resharding.
        device: of this rank.
        run: precision.
    """

    is_sharded, casts_gathered, takes_optimizers = True, True, False
    device: torch.device

    def __init__(self, ranks: Ranks, config: ParallelConfig, device: torch.device, run: OnlineConfig) -> None:
        super().__init__(ranks)
        self.config, self.device, self.run = config, device, run
        size = self.shards
        self._mesh: DeviceMesh = (
            init_device_mesh(device.type, (ranks.count,))
            if size == ranks.count
            else init_device_mesh(device.type, (ranks.count // size, size), mesh_dim_names=("replicate", "shard"))
        )

    def prepare(
        self, model: nn.Module, parts: Sequence[nn.Module], make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        for part in parts:
            self._shard(part, self.config.cpu_offload)
        return super().prepare(model, parts, make)

    def frozen(self, model: Model) -> Model:
        self._shard(model, self.config.cpu_offload or self.run.offload_frozen)
        return model

    def _shard(self, model: nn.Module, offload: bool) -> None:
        """Block by block, so that only one block's weights are whole at a time; of a model that rank 0 alone has, only
        one tensor on the others.

        Embedding and output head are groups too, unless they are one tensor: then the model's own group has it.
        """
        offload = offload and self._mesh.device_type != "cpu"  # where else would they be
        spreads = only_on_rank_0(model)
        whole = {name: parameter.data for name, parameter in model.named_parameters() if spreads}
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": self.config.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
            "shard_placement_fn": self._placement,
        }
        cast: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(autocast_dtype(self.run), torch.float32)}
        for block in blocks(model):
            fully_shard(block, **options, **cast)
        if isinstance(model, PreTrainedModel) and not model.can_generate():
            fully_shard(model.get_input_embeddings(), **options, **cast)
            # Scores and values are read by calling body and head, each by itself; heads compute in float32.
            for child in model.children():
                fully_shard(child, **options, **(cast if child is model.base_model else {}))
        elif isinstance(model, PreTrainedModel):
            outside = {} if self.run.head_float32 else cast
            embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
            if not {*embedding.parameters()} & {*head.parameters()}:
                fully_shard(embedding, **options, **outside)
                fully_shard(head, **options, **outside)
            fully_shard(model, **options, **outside)
        else:
            fully_shard(model, **options)
        if spreads:
            make_room(model, torch.device("cpu") if offload else self.device)
            self._spread(model, whole)

    @torch.no_grad()
    def _spread(self, model: nn.Module, whole: dict[str, Tensor]) -> None:
        """Give each rank its share of the whole weights, which rank 0 alone has and then forgets, one by one."""
        for name, parameter in model.named_parameters():
            tensor = whole.pop(name)
            self.swap_parameter(parameter, tensor if self.ranks.is_main else None)

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        """Experts, all of which are one tensor, are cut along another dimension where the ranks do not divide their
        number: FSDP would pad this to a multiple, and some ranks would hold nothing else.
        """
        if parameter.dim() < 3 or parameter.shape[0] % self.shards == 0:
            return None
        return next((Shard(i) for i in range(1, parameter.dim()) if parameter.shape[i] % self.shards == 0), None)

    @property
    def shards(self) -> int:
        return self.config.shard_size or self.ranks.count

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        for module in (module for part in self._parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last or self.config.reduce == "every_pass", recurse=False)
                module.set_requires_all_reduce(last, recurse=False)  # after the former, which sets this too
        return nullcontext()

    def architecture_of(self, model: nn.Module) -> type[Any]:
        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))

    def _clip(self, parameters: list[nn.Parameter], limit: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        return self.whole(norm).item()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def share(self, number: int, tensor: Tensor) -> Tensor:
        like = self.trained[number]
        if isinstance(tensor, DTensor) or not isinstance(like, DTensor) or tensor.shape != like.shape:
            return tensor  # a share already, or of another shape, such as the number of steps
        tensor = tensor.to(like.device)
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

    def room_for(self, number: int, size: torch.Size, dtype: torch.dtype) -> Tensor:
        like = self.trained[number]
        if not isinstance(like, DTensor) or size != like.shape:
            return super().room_for(number, size, dtype)
        return torch.empty_like(like, dtype=dtype, requires_grad=False)

    def reshard(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def swap_parameter(self, parameter: nn.Parameter, tensor: Tensor | None) -> Callable[[], Any]:
        assert isinstance(parameter, DTensor)
        mine, mesh = parameter.to_local(), parameter.device_mesh
        before = mine.clone()
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
        if tensor is not None:
            whole.copy_(tensor)
        mine.copy_(distribute_tensor(whole, mesh, parameter.placements).to_local())
        return partial(mine.copy_, before)
