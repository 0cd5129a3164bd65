"""What the keys that depend on the GPU mean on this one: the only place where a run, or a plan of one, decides that.

A key that is set keeps its value. A run decides once, before it looks for a checkpoint, and its checkpoints hold what
was decided: one of an older version, which computed in float32, is refused with the keys to set.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.config.generation import Dtype
from async_rlhf.config.stages import StageConfig
from async_rlhf.models.context_length import config_of
from async_rlhf.models.packing import keep_soft_cap, obstacle_in_code, runs_kernel

logger = logging.getLogger(__name__)

Model: TypeAlias = PreTrainedModel | str
Config = TypeVar("Config", OnlineConfig, StageConfig)


def with_gpu_defaults(config: Config, model: Model | None, device: torch.device, rows_per_unit: int = 1) -> Config:
    """The configuration with no key left that depends on the GPU; what a GPU decides is told in the log, in one line.

    Args:
        config: of a run or a stage, with ``max_prompt_length`` resolved.
        model: what is trained; None for a new model of a stage.
        device: where.
        rows_per_unit: of the algorithm.
    """
    if device.type != "cuda":
        return decided(config, has_bf16=False, packs=False, rows_per_unit=rows_per_unit)
    open_ = "on_gpu" in _dependent(config).values()
    packs = open_ and runs_kernel(device) and packs_rows(model, config.trust_remote_code)
    resolved = decided(config, has_bf16(device), packs, rows_per_unit)
    before, after = _dependent(config), _dependent(resolved)
    changed = ", ".join(f"{name} {json.dumps(after[name])}" for name in after if before[name] != after[name])
    if changed:
        logger.info("%s decides: %s; what you set is left as it is", device, changed)
    return resolved


def decided(config: Config, has_bf16: bool, packs: bool, rows_per_unit: int = 1) -> Config:
    """The same for a GPU of which this is known, or, with false twice, for a CPU.

    Args:
        config: of a run or a stage.
        has_bf16: whether the GPU has bfloat16.
        packs: whether it has a kernel for packed rows, and the model can be packed.
        rows_per_unit: of the algorithm.
    """
    fp16 = getattr(config, "fp16", False)
    resolved = replace(config, bf16=has_bf16 and not fp16) if config.bf16 == "auto" else config
    if isinstance(resolved, OnlineConfig):
        if resolved.generation.dtype == "auto":
            apart = resolved.generation.device == "cpu" or (resolved.launch == "ray" and resolved.ray.num_gpus == 0)
            dtype: Dtype = "bfloat16" if has_bf16 and resolved.in_bfloat16 and not apart else "float32"
            resolved = replace(resolved, generation=replace(resolved.generation, dtype=dtype))
        packs = packs and resolved.packing is not False and resolved.attn_implementation in (None, "sdpa")
        packs = packs and not resolved.deterministic  # no GPU has shown that the kernel repeats itself
        training = resolved.training_limits.rows(resolved.max_length, rows_per_unit)
        annotation = resolved.annotation_limits.rows(resolved.max_length)
        rows = {"max_tokens_per_pass": training, "annotate_max_tokens": annotation}
    else:
        rows = {"max_tokens_per_pass": resolved.per_device_train_batch_size * rows_per_unit}
    budget = packs and (resolved.in_bfloat16 or fp16)
    limits: dict[str, Any] = {key: number * resolved.max_length if budget else None for key, number in rows.items()}
    return replace(resolved, **{key: limit for key, limit in limits.items() if getattr(resolved, key) == "on_gpu"})


def has_bf16(device: torch.device) -> bool:
    """Whether a GPU computes in bfloat16, and does not only imitate it."""
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def packs_rows(model: Model | None, trust: bool) -> bool:
    """Whether a model's rows can be packed, as far as its code says.

    Args:
        model: a model, a folder or a hub name; None for a new one.
        trust: whether Python code that comes with it may be run.
    """
    if model is None:
        return True
    bare = bare_model(model, trust)
    if bare is None:
        return False
    keep_soft_cap(bare)
    return obstacle_in_code(bare) is None


def bare_model(model: Model, trust: bool) -> PreTrainedModel | None:
    """A model that is given by name without its weights; any other as it is. None if that cannot be made: the model
    itself will say what is wrong with it.
    """
    if not isinstance(model, str):
        return model
    described = config_of("model", model, trust)
    if described is None:  # adapters, or nothing
        return None
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(described, trust_remote_code=trust)
    except Exception as error:  # a model of another kind, or one that needs its weights
        logger.debug("what the model is made of is not known before it is loaded: %s", error)
        return None
    return model


def _dependent(config: OnlineConfig | StageConfig) -> dict[str, object]:
    """The keys that depend on the GPU."""
    names = ("bf16", "max_tokens_per_pass", "annotate_max_tokens")
    values = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return values | ({"generation.dtype": config.generation.dtype} if isinstance(config, OnlineConfig) else {})
