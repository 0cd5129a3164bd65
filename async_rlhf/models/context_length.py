"""How many tokens a model can read, and so how long a prompt may be where the configuration leaves it to the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from async_rlhf.config import ConfigError, GenerationConfig, OnlineConfig, PairsConfig
from async_rlhf.config.base import require
from async_rlhf.config.evaluation import HeldOutConfig
from async_rlhf.config.sizes import PROMPT_CAP
from async_rlhf.models.loading import from_pretrained

Model: TypeAlias = PreTrainedModel | str


def with_prompt_cap(config: OnlineConfig, model: Model) -> OnlineConfig:
    """The configuration with ``max_prompt_length`` and ``episode_length`` resolved, which no other place does.

    Raises:
        ConfigError: the model is nowhere, or has no room for a prompt beside the response.
    """
    if config.generation.max_turns is not None and config.generation.episode_length is None:
        config = _with_episode_length(config, model)
    if config.max_prompt_length is not None:
        return config
    key, length = f"generation.{length_key(config.generation)}", config.generation.longest_episode
    cap = prompt_cap({"model": model}, key, length, config.trust_remote_code)
    return replace(config, max_prompt_length=cap)


def _with_episode_length(config: OnlineConfig, model: Model) -> OnlineConfig:
    wanted, prompt, trust = config.generation.longest_episode, config.max_prompt_length, config.trust_remote_code
    prompt, length = shared_room({"model": model}, wanted, prompt, trust)
    generation = replace(config.generation, episode_length=length)
    return replace(config, max_prompt_length=prompt, generation=generation)


def shared_room(models: Mapping[str, Model], wanted: int, prompt: int | None, trust: bool) -> tuple[int, int]:
    """Most tokens of a prompt and of an episode after it: they share the positions of the model with the fewest.

    Args:
        models: models, folders or hub names, by the keys that errors name.
        wanted: most tokens of an episode.
        prompt: of a prompt; None for 512, but at most half of the positions.
        trust: whether Python code that comes with a model may be run.
    """
    configs = [config_of(name, model, trust) for name, model in models.items()]
    known = [positions for config in configs if config is not None and (positions := _positions(config)[0]) is not None]
    if not known:
        return prompt or PROMPT_CAP, wanted
    prompt = prompt or min(PROMPT_CAP, max(1, min(known) // 2))
    return prompt, max(1, min(wanted, min(known) - prompt))


def length_key(config: GenerationConfig) -> str:
    """The key that says how many tokens may follow a prompt."""
    return "response_length" if config.max_turns is None else "episode_length"


def sampling_prompt_cap(config: HeldOutConfig | PairsConfig, models: Mapping[str, str]) -> int:
    """``max_prompt_length`` resolved for all models, by the keys that errors name; see :func:`with_prompt_cap`."""
    if config.max_prompt_length is not None:
        return config.max_prompt_length
    return prompt_cap(models, "response_length", config.response_length, config.trust_remote_code)


def prompt_cap(models: Mapping[str, Model], key: str, response_length: int, trust: bool) -> int:
    """min(512, positions - response_length) tokens, by the model with the fewest positions.

    Args:
        models: models, folders or hub names, by the keys that errors name.
        key: what errors call ``response_length``.
        response_length: most tokens of a response.
        trust: whether Python code that comes with a model may be run.

    Raises:
        ConfigError: a folder is missing, or a model has no room for a prompt beside the response.
    """
    cap = PROMPT_CAP
    for name, model in models.items():
        config = config_of(name, model, trust)
        positions, why = (None, "") if config is None else _positions(config)
        if positions is not None:
            rule = f"must be below {positions}, the positions of {name}{why}, to leave room for a prompt"
            require(response_length < positions, key, response_length, rule)
            cap = min(cap, positions - response_length)
    return cap


def positions_of(model: PreTrainedModel) -> int | None:
    """Most tokens that a row may have, or None if the model states no limit.

    With rotary frequencies of type "longrope" it is that of pre-training: as soon as one row of a pass is longer, all
    rows get other frequencies, so the probabilities of each would depend on its neighbours. ("dynamic" ones change
    beyond ``max_position_embeddings`` only.)
    """
    return _positions(model.config)[0]


def _positions(config: PretrainedConfig) -> tuple[int | None, str]:
    """The limit, and what errors say of it."""
    text = config.get_text_config()
    limit, rotary = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    each_kind = [rotary, *(part for part in rotary.values() if isinstance(part, dict))]  # of layers, or one for all
    short = [kind["original_max_position_embeddings"] for kind in each_kind if kind.get("rope_type") == "longrope"]
    if limit is None or min(short, default=limit) >= limit:
        return limit, ""
    return min(short), " in pre-training (longrope: with one longer row in a pass, all rows get other frequencies)"


def config_of(key: str, model: Model, trust: bool) -> PretrainedConfig | None:
    """The configuration of a model, folder or hub name that errors call ``key``, without its weights.

    None if it cannot be read, as in a folder of adapters: what is wrong shows where the model is loaded.

    Raises:
        ConfigError: there is no such folder, or it brings code that is not trusted.
    """
    try:
        return from_pretrained(AutoConfig, model, key, trust) if isinstance(model, str) else model.config
    except ConfigError:
        raise
    except (OSError, ValueError):
        return None


def longest_row(model: PreTrainedModel, max_length: int) -> int:
    """``max_length``, but at most the model's number of positions."""
    return min(max_length, positions_of(model) or max_length)


def check_positions(
    model: PreTrainedModel, prompt_length: int, response_length: int, key: str = "response_length"
) -> None:
    """Require room for the longest prompt with the longest response, which ``key`` says."""
    limit, why = _positions(model.config)
    if limit is not None and prompt_length + response_length > limit:
        raise ConfigError(
            f"max_prompt_length: prompts of {prompt_length} tokens are too long; with {key} "
            f"{response_length} it must be at most {limit - response_length}, for the model has {limit} positions{why}"
        )
