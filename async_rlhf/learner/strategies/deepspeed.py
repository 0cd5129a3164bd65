"""DeepSpeed's ZeRO: shards the optimiser's state, the gradients and the weights over ranks, on GPUs and on CPUs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from async_rlhf.config import ConfigError, OnlineConfig, ParallelConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import Model, Parallel, require_finite
from async_rlhf.models.sharded_loading import make_room, only_on_rank_0


class ZeRO(Parallel):
    """Stage 1 shards the optimiser's state, 2 the gradients too, 3 the weights too (Rajbhandari et al., "ZeRO", 2020).

    Args:
        ranks: the ranks that share them.
        config: the stage, offloading, and more of DeepSpeed's own options.
        device: of this rank.
        run: sizes and precision.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """

    takes_optimizers, takes_shards = False, False

    def __init__(self, ranks: Ranks, config: ParallelConfig, device: torch.device, run: OnlineConfig) -> None:
        super().__init__(ranks)
        self.config, self.device, self.run = config, device, run
        self.stage = int(config.strategy.removeprefix("zero"))
        self.is_sharded = self.stage == 3
        self._deepspeed = _import_deepspeed(device, config.strategy)

    def prepare(
        self, model: nn.Module, parts: Sequence[nn.Module], make: Callable[[], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        if self.is_sharded:
            size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            self.config.require_size(size, self.run.in_bfloat16 or self.run.fp16)
        spread = [part for part in parts if only_on_rank_0(part)]
        for part in spread:
            make_room(part, torch.device("cpu"))
        super().prepare(model, parts, make)  # while weights have their shapes, which say what decays
        for part in spread:
            self._spread(part)
        options = {"model": model, "optimizer": self.optimizer, "config": self._options(self.stage)}
        self._engine, self._zero, *_ = self._deepspeed.initialize(**options)
        self._zero.torch_autocast_gradscaler = None  # see LossScale
        return self.optimizer

    def frozen(self, model: Model) -> Model:
        """With stage 3 an inference engine that shards the weights; a smaller stage shards nothing here."""
        if self.is_sharded:
            options = {key: value for key, value in self._options(3).items() if key != "gradient_clipping"}
            if only_on_rank_0(model):
                make_room(model, torch.device("cpu"))
                self._spread(model)
            self._deepspeed.initialize(model=model, config=options)
        return model

    def _spread(self, model: nn.Module) -> None:
        """Shard a model weight by weight: DeepSpeed gives each of rank 0's to all, of which each keeps its part."""
        self._deepspeed.zero.Init(module=model, config_dict_or_path=self._options(3))

    def forward(self, *args: Any) -> Any:
        return self._engine(*args)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        if self.loss_scale is not None:
            self._zero.override_loss_scale(self.loss_scale.value)
        self._engine.backward(loss * self.ranks.count, scale_wrt_gas=False)

    def step(self, limit: float) -> list[float] | None:
        """As in the base class, but all parts are clipped together, and the norm is known only after the step."""
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if self._overflowed([norm]):  # DeepSpeed has skipped the step
            return None
        require_finite([norm])
        return [norm]

    def moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        moments = {}
        if self.stage < 3 and self.optimizer.state:
            # The states were linked after the first group's first step, when the other groups had none yet: link again.
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        for i, parameter in enumerate(self.trained):
            for name in ("exp_avg", "exp_avg_sq"):
                tensor = safe_get_full_optimizer_state(parameter, name)
                if tensor is not None and self.ranks.is_main:  # before the first step there is none
                    moments[f"{i}.{name}"] = tensor.cpu()
                    moments[f"{i}.step"] = self._steps().clone()
        return moments

    def _steps(self) -> Tensor:
        return next(state["step"] for state in self.optimizer.state.values() if "step" in state)

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        if not moments:
            return
        kind = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        for flat in getattr(self._zero, kind):  # the optimiser has no state before its first step
            zeros = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[flat] = {"step": moments["0.step"].clone().to(flat.device), **zeros}
        if self.stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()
        for i, parameter in enumerate(self.trained):
            for name in ("exp_avg", "exp_avg_sq"):
                self._set(parameter, name, moments[f"{i}.{name}"].to(self.device))

    def _set(self, parameter: nn.Parameter, name: str, value: Tensor) -> None:
        """Keep this rank's part of a whole tensor of the optimiser's state."""
        from deepspeed.utils import safe_get_local_optimizer_state, safe_set_full_optimizer_state

        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, value, name)
            return
        # DeepSpeed's setter of whole tensors fails in stage 3 if the ranks do not divide the size.
        mine = safe_get_local_optimizer_state(parameter, name)
        part = value.flatten()[self.ranks.rank * mine.numel() :][: mine.numel()]
        mine[: len(part)].copy_(part)

    def shape_of(self, parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        with self._deepspeed.zero.GatheredParameters(list(parameters), enabled=self.is_sharded):
            yield

    def unsharded(
        self, parameters: Sequence[nn.Parameter], compute: Callable[[], Tensor], dtype: torch.dtype | None
    ) -> Tensor:
        """As in the base class. DeepSpeed gathers what it keeps, so what is rounded before is gathered here."""
        first: Any = parameters[0]
        part = getattr(first, "ds_tensor", None)
        elsewhere = getattr(part, "final_location", None) == "nvme"
        if dtype is None or len(parameters) > 1 or part is None or elsewhere:
            return super().unsharded(parameters, compute, dtype)  # what was gathered stays as long as it is held
        mine = part.data.to(self.device, dtype)
        whole = torch.empty(mine.numel() * self.ranks.count, dtype=dtype, device=self.device)
        dist.all_gather_into_tensor(whole, mine, group=first.ds_process_group)
        return whole[: first.ds_numel].view(first.ds_shape)

    def swap_parameter(self, parameter: nn.Parameter, tensor: Tensor | None) -> Callable[[], Any]:
        before: Tensor | None = None
        with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if tensor is not None:
                before = parameter.data.cpu().clone()
                parameter.data.copy_(tensor)
        return partial(self.swap_parameter, parameter, before)

    def _options(self, stage: int) -> dict[str, Any]:
        """DeepSpeed's configuration: the user's options, plus those that follow from the run."""
        options = copy.deepcopy(self.config.deepspeed)
        zero = options.setdefault("zero_optimization", {})
        zero["stage"] = stage
        # Else it replaces torch's linear layer in the whole process by one that rounds differently.
        zero.setdefault("memory_efficient_linear", False)
        if self.config.cpu_offload:
            zero.setdefault("offload_optimizer", {"device": "cpu"})
            if stage == 3:
                zero.setdefault("offload_param", {"device": "cpu"})
        return {
            **options,
            "train_micro_batch_size_per_gpu": self.run.units_by_pass,
            "gradient_accumulation_steps": 1,  # accumulating() says where a step ends
            "gradient_clipping": self.run.max_grad_norm,
            "torch_autocast": {
                "enabled": self.run.in_bfloat16 or self.run.fp16,
                "dtype": "float16" if self.run.fp16 else "bfloat16",
                "lower_precision_safe_modules": [],
            },
            # The optimiser is the same AdamW in float32 as everywhere else.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }


def _import_deepspeed(device: torch.device, strategy: str) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"parallel.strategy: got {strategy!r}; needs DeepSpeed: pip install 'async-rlhf[deepspeed]'"
        ) from error
    if device.type == "cpu":
        # An operation for inference with tensor parallelism, which nothing here uses: compiling it takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
