"""What engines are made of: the model of a run, and where it is to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from async_rlhf.config import OnlineConfig, VLLMConfig, engines
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.generation.protocol import Engine, SamplingParams
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.loading import brings_code
from async_rlhf.models.quantised import is_quantised, unquantised


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Enough to build the policy's architecture; its weights come as snapshots."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    dtype: torch.dtype
    device: str
    num_threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    autocast: torch.dtype | None = None
    engine: str = "transformers"
    """As ``generation.engine`` names it."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """Options of vLLM."""
    base: str | None = None
    """Folder of the weights below the adapters, if only the adapters are published."""
    adapter: Any = None
    """peft's configuration of those adapters."""
    sleeps: bool = False
    """Whether the engine must be able to free its memory."""
    max_length: int | None = None
    """Most tokens of prompt and response together; None for the model's own limit. vLLM reserves memory for these."""

    deterministic: bool = False
    """Whether to compute with deterministic kernels only."""

    @classmethod
    def for_workers(
        cls, config: OnlineConfig, policy: PreTrainedModel, parallel: Parallel, device: str, num_threads: int | None
    ) -> ModelSpec:
        """The policy of a run, for workers on ``device``."""
        generation = config.generation
        return cls(
            parallel.architecture_of(policy),
            unquantised(policy) if is_quantised(policy) else policy.config,
            getattr(torch, generation.weights_dtype),
            device,
            num_threads,
            autocast_dtype(config),
            generation.engine,
            generation.vllm,
            max_length=config.max_length,
            deterministic=config.deterministic,
        )

    @property
    def gpus(self) -> int:
        """How many GPUs share the model, if it is on GPUs."""
        return self.vllm.tensor_parallel_size

    @property
    def brings_code(self) -> bool:
        """Whether the architecture is code that came with the model. The learner runs it already: the user said so."""
        return brings_code(self.model_class) or brings_code(type(self.config))

    def environment(self, devices: tuple[str, ...]) -> dict[str, str] | None:
        """Of a process in which the engine runs on these devices; None if any process will do."""
        name = engines.find(self.engine).environment
        return None if name is None else engines.load(name)(devices)


def make_engine(spec: ModelSpec, params: SamplingParams) -> Engine:
    """The engine that the spec asks for; its weights must still be loaded."""
    return engines.load(engines.find(spec.engine).make)(spec, params)
