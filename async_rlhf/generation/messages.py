"""Messages between the learner and the processes that sample for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from async_rlhf.config import OnlineConfig, VLLMConfig
from async_rlhf.generation.protocol import Completions, SamplingParams
from async_rlhf.models.forward import autocast_dtype
from async_rlhf.models.loading import brings_code
from async_rlhf.models.quantised import is_quantised, unquantised
from async_rlhf.ranks.parallel import Parallel
from async_rlhf.types import Prompt


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
    vllm: VLLMConfig | None = None
    """None for the engine on transformers."""
    base: str | None = None
    """Folder of the weights below the adapters, if only the adapters are published."""
    adapter: Any = None
    """peft's configuration of those adapters."""
    sleeps: bool = False
    """Whether vLLM must be able to free its memory."""
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
            getattr(torch, generation.dtype),
            device,
            num_threads,
            autocast_dtype(config),
            vllm=generation.vllm if generation.engine == "vllm" else None,
            max_length=config.max_length,
            deterministic=config.deterministic,
        )

    @property
    def gpus(self) -> int:
        """How many GPUs share the model, if it is on GPUs."""
        return 1 if self.vllm is None else self.vllm.tensor_parallel_size

    @property
    def brings_code(self) -> bool:
        """Whether the architecture is code that came with the model. The learner runs it already: the user said so."""
        return brings_code(self.model_class) or brings_code(type(self.config))


@dataclass(frozen=True, slots=True)
class Request:
    """Some prompts of a batch, or of an evaluation, for one worker."""

    batch: int
    """Number of the batch; of an evaluation, minus the version that is evaluated."""
    unit: int
    """Its number among the units of all those prompts, from 0."""
    version: int | None
    """None for the newest when the worker starts."""
    prompts: tuple[Prompt, ...]
    probe: int = 0
    """Probe versions that this number divides; 0 for none."""
    in_flight: bool = False
    """Switch to newer weights as soon as there are any."""
    params: SamplingParams | None = None
    """How to sample in an evaluation; None for a batch, which is sampled as the worker was told at its start."""
    behind: int = 0
    """The batch behind which an evaluation is sampled."""
    after: int = 0
    """Begin when this version is there, or a newer one; it may still be on its way."""

    @property
    def turn(self) -> tuple[int, bool, int]:
        """Requests are sampled in this order."""
        evaluates = self.params is not None
        return self.behind if evaluates else self.batch, evaluates, self.unit


def work(batch: int) -> str:
    """What a request is for, in words, by its number."""
    return f"batch {batch}" if batch >= 0 else f"the evaluation of version {-batch}"


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is built: the worker can take requests."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The completions of a request, and proof of the weights that they come from."""

    batch: int
    version: int
    """Version of the weights that drew the first tokens."""
    digests: dict[int, dict[str, str]]
    """By version: the digest of each tensor, as read back from the engine after it loaded them."""
    asked: str
    """Fingerprint of the prompts that were sampled for; see :func:`~async_rlhf.generation.replies.fingerprint`."""
    completions: Completions
    started: float
    """Monotonic clock."""
    ended: float
    load_seconds: float
    probe: tuple[int, list[float]] | None = None
    """Version, and its log-probabilities of the probe's sequences, if the request asked for them."""
    unit: int = 0
    """Of the batch, as in the request."""
    occupancy: tuple[int, int] = (0, 0)
    """Places that were taken, and places that there were, in all steps of decoding since the worker's last reply."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine raised; the learner raises it again."""

    message: str
    traceback: str
    is_config: bool = False
    """It is a ConfigError, whose message is enough."""
    out_of_memory: bool = False
    """A new process, with all of its memory free, may succeed."""
    is_lost: bool = False
    """It is an EngineLostError; a new process may succeed."""
