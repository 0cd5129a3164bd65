"""Configuration of generation for evaluation, and of evaluation itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from async_rlhf.config.base import configuration, key, require
from async_rlhf.config.common import (
    EpisodesConfig,
    HeldOutShareConfig,
    OnRanksConfig,
    ResultsConfig,
    RewardTokensConfig,
    SamplingConfig,
    WorldConfig,
)
from async_rlhf.config.engines import able, find
from async_rlhf.config.episodes import KINDS
from async_rlhf.config.generation import Dtype, VLLMConfig
from async_rlhf.config.rewards import JudgeConfig


@configuration
class HeldOutConfig(ResultsConfig, SamplingConfig, WorldConfig, EpisodesConfig, HeldOutShareConfig):
    """Models that answer held-out prompts, and how."""

    models: dict[str, str] = key({}, main="data and models", names="model")
    """Name -> folder or hub name (owner/model or owner/model@revision), e.g. {"sft": "runs/sft", "rl": "org/rl"}."""
    run: str | None = key(None, main="data and models", names="run")
    """The output folder of ``train``: all its checkpoints and its final model, under those names."""
    checkpoints: list[str] = key([])
    """Only these checkpoints of ``run``, e.g. ["checkpoint-128", "final"]; empty for all."""
    data: str = key("", main="data and models", names="data")
    """Rows with `query` (see prompt_field)."""
    split: str = "validation"
    """The split to take if there are several."""
    eval_fraction = key(None)
    """Take only the rows that other commands hold out of this data with the same eval_fraction; null for all."""
    engine: str = "transformers"
    """ "transformers", "vllm", or "module:NAME" of your own."""
    dtype: Dtype = "float32"
    """Type of the weights that sample."""
    vllm: VLLMConfig = key(VLLMConfig)
    """Options of vLLM."""

    @property
    def plays(self) -> bool:
        """Whether answers are episodes."""
        return self.max_turns is not None

    def check(self) -> None:
        self.world.check(self.max_turns, key="max_turns")
        self.require(self.data != "", "data", "give the held-out prompts: a file, a folder, or a name on the hub")
        named = len(self.models) > 0 or self.run is not None
        self.require(named, "models", "give at least one, as name: folder, or a run")
        self.require(self.run is not None or not self.checkpoints, "checkpoints", "must be empty without run")
        for name in self.models:
            rule = "must be a name that can be a file's, without a slash"
            require(name != "" and "/" not in name and not name.startswith("."), "models", name, rule)
            require(name != "reference_response", "models", name, "is the name of the human responses; must be another")
        super().check()
        supports = find(self.engine).supports
        rule = f"must be left out unless engine is {able('vllm_options')}"
        self.require("vllm_options" in supports or self.vllm == VLLMConfig(), "vllm", rule)
        rule = f"must be {able('policy')} with parallel.ranks above 1: vLLM would take the ranks for its own"
        self.require(self.parallel.ranks == 1 or "policy" in supports, "engine", rule)


@configuration
class GenerateConfig(HeldOutConfig):
    """Completions of held-out prompts by several models: ``async-rlhf generate``.

    Writes ``<name>.jsonl`` for every model. Completions that are written already, even in an unfinished file, are not
    sampled again.
    """


@configuration(kw_only=True)
class EvaluateConfig(HeldOutConfig, RewardTokensConfig):
    """Evaluation on held-out prompts: ``async-rlhf evaluate``. Samples as ``generate`` does, then judges.

    Rows may have `reference_response` or `query_reference_response`, the human answers.
    """

    generations: str | None = key(None, main="data and models", names="folder")
    """The output folder of ``generate`` to judge, instead of models or a run with data; temperature is then
    the one that they were sampled at."""
    reference: str | None = key(None, main="judging")
    """The name of the model that win-rates and KL, at the temperature of sampling, are taken against; null for the
    first."""
    ref_model: str | None = key(None, names="model")
    """A folder or hub name: KL and perplexity are taken under this model instead."""
    judge: JudgeConfig = key(JudgeConfig)
    """A language model that compares completions, in place of a reward."""
    penalties: Literal["training"] | None = None
    """ "training" scores answers as the run did that trained the models, with its penalties for what is cut off and for
    length, by the run.yml beside them; null leaves penalties out, and says what they would change."""
    num_samples: int = key(10, ge=0, main="judging")
    """Prompts shown side by side."""
    track: bool = key(True, role="log")
    """With run, log the results of its checkpoints in its own runs of W&B and TensorBoard, each at its batch; report_to
    of the training says which."""

    def check(self) -> None:
        if self.generations is None:
            super().check()
        else:
            self.leaves_out(_SAMPLED, "with generations, which were sampled already")
            OnRanksConfig.check(self)
        known = self.reference is None or not self.models or self.run is not None or self.reference in self.models
        self.require(known, "reference", f"must be one of the models: {', '.join(self.models)}")
        rule = "must be null with an environment, tools or an agent: a reward model reads one answer; use reward_funcs"
        self.require(not self.plays or self.reward_model is None, "reward_model", rule)
        if self.judge.url is None:
            self.leaves_out([f"judge.{item.name}" for item in fields(JudgeConfig)], "without judge.url")
            if not (self.environment or self.agent) or self.reward_funcs:
                self.check_judge()
            alone = self.reward_model is not None or self.reward_tokenizer is None
            self.require(alone, "reward_tokenizer", "must be null without reward_model")
        else:
            names = ("penalties", "reward_model", "reward_tokenizer", "reward_funcs")
            self.leaves_out(names, "with judge.url")


_SAMPLED = (
    *("models", "run", "data", "split", "prompt_field", "prompt_words", "eval_fraction"),
    *("temperature", "top_p", "top_k", "response_length", "max_prompt_length", "engine", "seed", "checkpoints"),
    *("dtype", "vllm", *KINDS, "max_turns", "episode_length", "step_timeout"),
)
"""Keys of EvaluateConfig that mean nothing where completions are given."""
