"""Keys that do not exist: where they stand, and which key may be meant."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from typing import Any

from async_rlhf.config.errors import ConfigError

logger = logging.getLogger(__name__)

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

DROPPED: dict[str, str] = {
    "curriculum": "sort the data, or train on the prompts whose rewards differ, with trained_prompts",
    "replay": "run its run.yml again with another train.output_dir, and compare metrics.jsonl",
    "replay_from": "an exact run repeats by itself",
    "staleness_mode": "leave it out; with generation.in_flight the newest weights sample",
    "feedback": "use a reward function that asks people: recipes/feedback",
    "stop_at": "metric_for_best_model names it, and early_stopping_patience ends the run",
    "stop_patience": "early_stopping_patience",
    "reward_model_bits": "give a trainer in Python a model that is loaded so, or score with one in a reward function",
    "data.streaming": "data are downloaded and stay on disk; data.train_split 'train[:10000]' takes a part of them",
}
"""Keys, groups of keys and commands of earlier versions, by their own name, and what to do instead."""
_IDLE = {"feedback.answers": 1, "staleness_mode": "exact", "stop_patience": 3}
"""What such keys held without being of use, where that was not nothing."""
_ENDED = ("stop_at", "stop_patience")
"""Dropped keys that decided only when a run ends: a run may go on without them."""


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"seed": 0}} as {"train.seed": 0}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def dropped(key: str) -> str:
    """The end of an error about a key or command of earlier versions; empty for any other."""
    name = key.replace("-", "_").removeprefix("train.")
    instead = next((instead for old, instead in DROPPED.items() if f"{name}.".startswith(f"{old}.")), "")
    return instead and f"it was dropped in 0.1.0: {instead}"


def is_idle(key: str, value: Any) -> bool:
    """Whether a key that was dropped, or each of a group of them, has a value that made no use of it."""
    values = dotted({key.removeprefix("train."): value})
    return all(not each or each == _IDLE.get(name) for name, each in values.items())


def kept(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that an earlier version has saved, with dotted keys, without those that were dropped.

    Raises:
        ConfigError: it made use of one.
    """
    for key, value in saved.items():
        needed = key == "staleness_mode" and saved.get("generation.in_flight")  # "bounded", which in flight is still
        if not dropped(key) or is_idle(key, value) or needed:
            continue
        if key.rpartition(".")[2] in _ENDED:
            logger.warning("%s: the earlier run has %r, which no longer ends it; %s", key, value, dropped(key))
        else:
            raise ConfigError(f"{key}: the earlier run has {value!r}; {dropped(key)}")
    return {key: value for key, value in saved.items() if not dropped(key)}


def meant(key: str, known: Collection[str], dashes: str) -> str:
    """The end of an error: what to do instead of a key of earlier versions; or which key may be meant, with what stands
    before it; nothing if none is like it.
    """
    if end := dropped(key):
        return f"; {end}"
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
