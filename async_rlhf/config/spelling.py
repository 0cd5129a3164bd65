"""Keys that do not exist: where they stand, and which key may be meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

_ELSEWHERE = {
    "num_generations": "train.samples_per_prompt",
    "max_completion_length": "train.generation.response_length",
    "max_new_tokens": "train.generation.response_length",
    "max_steps": "train.batches",
    "num_iterations": "train.num_epochs",
    "num_ppo_epochs": "train.num_epochs",
    "missing_eos_penalty": "train.penalty_reward_value",
    "model_name_or_path": "model",
    "dataset_name": "data.train",
    "reward_model_path": "reward_model",
    "use_vllm": "train.generation.engine",
    "per_device_batch_size": "train.per_device_train_batch_size",
    "sharded": "model.strategy",
    "beta": "train.kl.coef",
    "epsilon": "train.cliprange",
    "epsilon_high": "train.cliprange_high",
    "optim": "train.optimizer",
    "eval_strategy": "train.eval_steps",
    "save_strategy": "train.save_steps",
    "log_completions": "train.num_samples_logged",
    "mask_truncated_completions": "train.mask_truncated",
    "generation_batch_size": "train.completions_per_batch",
    "peft_config": "train.lora.rank",
    "chat_template_kwargs": "train.chat.template_arguments",
    "warmup_ratio": "train.warmup_steps",
    "gradient_checkpointing_kwargs": "train.gradient_checkpointing",
}
"""What other trainers, or earlier versions, call a key, and our name for it."""
_OF_OTHERS = {
    "loss_type": "the algorithm says it: GRPOConfig, DrGRPOConfig, CISPOConfig, GSPOConfig; docs/names.md lists TRL's",
    "importance_sampling_level": "GSPOConfig has ratios of whole completions",
    "remove_unused_columns": "leave it out: every column reaches the reward functions",
}
"""What other trainers call a choice that is no key here, and where it is made."""


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"seed": 0}} as {"train.seed": 0}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def meant(key: str, known: Collection[str], dashes: str) -> str:
    """The end of an error: which key may be meant, with what stands before it; nothing if none is like it."""
    if elsewhere := _OF_OTHERS.get(key.rpartition(".")[2]):
        return f"; {elsewhere}"
    candidate = nearest(key, known)
    return "" if candidate is None else f"; did you mean {dashes}{candidate}?"


def nearest(key: str, known: Collection[str]) -> str | None:
    """The key that is most likely meant: the same name elsewhere, another trainer's name, or a similar spelling."""
    last = key.rpartition(".")[2].replace("-", "_")
    alike = [name for name in known if name.rpartition(".")[2] == last]
    if alike:  # the one nearest to the top, as train.num_threads before train.generation.num_threads
        return min(alike, key=lambda name: (name.count("."), name))
    ours = _ELSEWHERE.get(last, "")
    for each in (ours, ours.removeprefix("train.")):  # in Python without
        if each in known:
            return each
    whole = difflib.get_close_matches(key, known, 1, 0.75)
    lasts = {name.rpartition(".")[2]: name for name in sorted(known, key=lambda name: -name.count("."))}
    part = difflib.get_close_matches(last, lasts, 1, 0.7)
    return whole[0] if whole else lasts[part[0]] if part else None
