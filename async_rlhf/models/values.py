"""Value models and value heads: made from the policy or the reward model, or read."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from async_rlhf.config import ConfigError
from async_rlhf.models.loading import brings_code, check_reward_model, disable_dropout, load_reward_model
from async_rlhf.models.quantised import unquantised
from async_rlhf.models.weights import named_weights

VALUE_HEAD = "value_head.safetensors"


def new_value_model(policy: PreTrainedModel) -> PreTrainedModel:
    """A value model on a copy of the policy's body, whose initial values are all 0."""
    config = unquantised(policy)
    config.num_labels = 1
    try:
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=brings_code(type(policy)))
    except ValueError as error:
        raise ConfigError(f"value_model: none can be made from {type(policy).__name__}: {error}") from error
    check_reward_model(model, "value_model")
    prefix = f"{policy.base_model_prefix}."
    body = {name.removeprefix(prefix): tensor for name, tensor in named_weights(policy).items()}
    missing = model.base_model.load_state_dict(body, strict=False).missing_keys
    if missing:
        raise ConfigError(f"value_model: none can be made from {type(policy).__name__}: it lacks {missing[0]}")
    nn.init.zeros_(model.score.weight)
    return disable_dropout(model).to(policy.device)


def load_value_head(folder: Path, head: nn.Linear) -> None:
    """Read a value head that :func:`write_value_head` wrote."""
    file = folder / VALUE_HEAD
    if not file.is_file():
        raise ConfigError(f"value_model: got {str(folder)!r}; with shared_trunk it must be a folder with {VALUE_HEAD}")
    try:
        head.load_state_dict(load_file(file))
    except (RuntimeError, SafetensorError) as error:
        raise ConfigError(f"value_model: {str(file)!r} holds no head for this policy: {error}") from error


def new_value_head(policy: PreTrainedModel, folder: str | None) -> nn.Linear:
    """A value head on the policy's states with all values 0, or the one in a folder."""
    head = nn.Linear(policy.get_output_embeddings().in_features, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if folder is not None:
        load_value_head(Path(folder), head)
    return head


def value_model_for(
    value_model: PreTrainedModel | str | None,
    reward_model: PreTrainedModel | None,
    policy: PreTrainedModel,
    device: torch.device,
    trust: bool = False,
) -> PreTrainedModel:
    """The given value model, or the one of that name; else a copy of the reward model, else the policy's body."""
    if isinstance(value_model, str):
        return load_reward_model(value_model, device, "value_model", trust=trust)
    if value_model is not None and value_model is reward_model:
        raise ConfigError("value_model: got the reward model itself; give a copy, or None for one")
    if value_model is not None:
        return check_reward_model(value_model, "value_model").to(device)
    return (new_value_model(policy) if reward_model is None else copy.deepcopy(reward_model)).to(device)
