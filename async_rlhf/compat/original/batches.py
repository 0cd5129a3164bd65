"""The size of a batch and the number of batches, as the original counts them and as we do."""

from __future__ import annotations

import os
from dataclasses import dataclass

from async_rlhf.compat.original.translation import IDLE_THERE, MAPPED, Translation
from async_rlhf.config.base import ConfigError, require
from async_rlhf.config.parallel import launched_ranks
from async_rlhf.config.parsing import ENVIRONMENT_PREFIX

_SANITY_BATCHES = 2


@dataclass(frozen=True)
class Batches:
    """A run's batches.

    Args:
        number: B.
        prompts: of one batch, over all ranks.
        completions: of one batch.
    """

    number: int
    prompts: int
    completions: int


def learner_ranks(t: Translation) -> int:
    """The number of learner ranks: from our own option, else as many as were launched."""
    option = "train.parallel.ranks"
    variable = f"{ENVIRONMENT_PREFIX}_{option.replace('.', '__').upper()}"
    said = t.overrides.get(option, os.environ.get(variable, "null"))
    return int(said) if said.isdecimal() else launched_ranks()


def batches(t: Translation, algorithm: str) -> Batches:
    """Translate the keys that make up a batch.

    In the original, batch_size = per_device_train_batch_size x gradient_accumulation_steps x num_mini_batches x ranks
    counts prompts, but in RLOO completions, so that its batch has 1 / rloo_k as many prompts; total_episodes counts the
    same. Here all of them count prompts.

    Raises:
        ConfigError: the numbers are not divisible.
    """
    per_device, accumulation = t["per_device_train_batch_size"], t["gradient_accumulation_steps"]
    minis, episodes, samples = t["num_mini_batches"], t.needed("total_episodes"), t["rloo_k"]
    sizes = {
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
        "num_mini_batches": minis,
        "rloo_k": samples,
        "total_episodes": episodes,
    }
    for key, value in sizes.items():
        require(value >= 1, key, value, "must be at least 1")
    ranks = learner_ranks(t)
    size = per_device * accumulation * minis * ranks
    if t["sanity_check"]:
        episodes = _SANITY_BATCHES * size
    unit = "completions" if algorithm == "rloo" else "prompts"
    right = (
        f"must be a multiple of the batch of {size} {unit} (per_device_train_batch_size {per_device} x "
        f"gradient_accumulation_steps {accumulation} x num_mini_batches {minis} x {ranks} ranks)"
    )
    require(episodes % size == 0, "total_episodes", episodes, right)
    _sizes(t, algorithm, episodes)
    prompts = size // samples if algorithm == "rloo" else size
    return Batches(episodes // size, prompts, prompts * (1 if algorithm == "ppo" else samples))


def _sizes(t: Translation, algorithm: str, episodes: int) -> None:
    per_device, accumulation = t["per_device_train_batch_size"], t["gradient_accumulation_steps"]
    samples = t["rloo_k"]
    share, note, unit = 1, MAPPED, MAPPED
    if algorithm == "rloo":
        share = samples
        note = f"divided by rloo_k: counts passes over completions there; here each stands for {samples} passes"
        unit = "divided by rloo_k: counts completions there, prompts here"
    per_device_note = MAPPED
    if accumulation % share == 0:
        accumulation //= share
    elif per_device % share == 0:
        per_device //= share
        per_device_note, note = note, MAPPED
    else:
        raise ConfigError(
            f"gradient_accumulation_steps: got {accumulation}; it or per_device_train_batch_size ({per_device}) must "
            f"be a multiple of rloo_k ({samples}): RLOO trains on all {samples} completions of a prompt"
        )
    t.maps("per_device_train_batch_size", {"train.per_device_train_batch_size": per_device}, per_device_note)
    t.maps("gradient_accumulation_steps", {"train.gradient_accumulation_steps": accumulation}, note)
    minis = t["num_mini_batches"]
    shuffled = "mapped; mini-batches are shuffled by the seed here, there in order or by no seed"
    t.maps("num_mini_batches", {"train.num_mini_batches": minis}, shuffled if minis > 1 else MAPPED)
    if t["sanity_check"]:
        unit = f"{_SANITY_BATCHES} batches for a sanity check"
    t.maps("total_episodes", {"train.total_episodes": episodes // share}, unit)
    if algorithm == "ppo":
        t.idle(f"{IDLE_THERE}: PPO draws one completion of a prompt", "rloo_k")
    else:
        t.maps("rloo_k", {"train.samples_per_prompt": samples})
