"""Configuration of generation for evaluation, and of evaluation itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from async_rlhf.config.base import DEVICE, FOLDER, REQUIRED, Checked, at_least, key, require
from async_rlhf.config.engines import able, find
from async_rlhf.config.generation import TEMPERATURE, TOP_K, TOP_P, Dtype, VLLMConfig
from async_rlhf.config.online import SEED
from async_rlhf.config.parallel import SharedConfig, check_device
from async_rlhf.config.rewards import JudgeConfig, check_bits, check_one_judge
from async_rlhf.config.rows import EVAL_FRACTION, PROMPT_WORDS, check_prompt_words


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(Checked):
    """Models that answer held-out prompts, and how."""

    models: dict[str, str] = key({}, main="data and models")
    """Name -> folder or hub name (owner/model or owner/model@revision), e.g. {"sft": "runs/sft", "rl": "org/rl"}."""
    run: str | None = key(None, main="data and models")
    """The output folder of ``train``: all its checkpoints and its final model, under those names."""
    checkpoints: list[str] = key([])
    """Only these checkpoints of ``run``, e.g. ["checkpoint-128", "final"]; empty for all."""
    data: str = key("", main="data and models")
    """Rows with `query` (see prompt_field)."""
    split: str = "validation"
    """The split to take if there are several."""
    prompt_field: str = "query"
    """The column with the prompt, as text or as messages of a chat."""
    prompt_words: int | None = key(None, PROMPT_WORDS)
    """For rows of plain `text`: its first so many words are the prompt, the rest is the human answer."""
    eval_fraction: float | None = key(None, EVAL_FRACTION)
    """Take only the rows that other commands hold out of this data with the same eval_fraction; null for all."""
    output_dir: str = key(REQUIRED, FOLDER, role="place", main="output")
    """Where the results go."""
    engine: str = "transformers"
    """ "transformers", "vllm", or "module:NAME" of your own."""
    temperature: float = key(0.7, *TEMPERATURE, main="sampling")
    """Temperature of sampling, and of the log-probabilities in the KL; with generations, the one that they were sampled
    at."""
    top_p: float = key(1.0, *TOP_P)
    """Draw only from the likeliest tokens that have this probability together; 1 draws from all. A KL is then that of
    the truncated distribution."""
    top_k: int = key(0, *TOP_K)
    """Draw only from this many of the likeliest tokens; 0 draws from all."""
    response_length: int = key(53, at_least(1), main="sampling")
    """Most new tokens of a completion."""
    max_prompts: int | None = key(None, at_least(1), main="sampling")
    """Take only this many prompts; null for all."""
    max_prompt_length: int | None = key(None, at_least(1))
    """Prompts with more tokens are dropped, and counted; null for 512, or less if a model has not so many positions
    besides those of the response."""
    batch_size: int = key(256, at_least(1))
    """Completions decoded together."""
    dtype: Dtype = "float32"
    """Type of the weights that sample."""
    vllm: VLLMConfig = key(VLLMConfig)
    """Options of vLLM."""
    seed: int = key(0, *SEED, main="sampling")
    """Seed of sampling."""
    device: str | None = key(None, DEVICE, role="place")
    """Where to compute, e.g. "cuda:0"; null takes the first GPU, or the CPU."""
    parallel: SharedConfig = key(SharedConfig)
    """The command on several ranks, which share the prompts."""
    trust_remote_code: bool = key(False, role="place")
    """Run Python code that comes with a model; with false, a model that needs this is an error."""
    overwrite: bool = key(False, role="place", main="output")
    """Do it again even if it is done already."""

    def check(self) -> None:
        require(self.data != "", "data", self.data, "give the held-out prompts: a file, a folder, or a name on the hub")
        given = len(self.models) > 0 or self.run is not None
        require(given, "models", self.models, "give at least one, as name: folder, or a run")
        right = "must be empty without run"
        require(self.run is not None or not self.checkpoints, "checkpoints", self.checkpoints, right)
        for name in self.models:
            right = "must be a name that can be a file's, without a slash"
            require(name != "" and "/" not in name and not name.startswith("."), "models", name, right)
            right = "is the name of the human responses; must be another"
            require(name != "reference_response", "models", name, right)
        check_prompt_words(self.prompt_words, self.prompt_field)
        supports = find(self.engine).supports
        right = f"must be left out unless engine is {able('vllm_options')}"
        require("vllm_options" in supports or self.vllm == VLLMConfig(), "vllm", self.vllm, right)
        right = f"must be {able('policy')} with parallel.ranks above 1: vLLM would take the ranks for its own"
        require(self.parallel.ranks == 1 or "policy" in supports, "engine", self.engine, right)
        check_device(self.device, self.parallel.ranks)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(HeldOutConfig):
    """Completions of held-out prompts by several models: ``async-rlhf generate``.

    Writes ``<name>.jsonl`` for every model. Completions that are written already, even in an unfinished file, are not
    sampled again.
    """


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(HeldOutConfig):
    """Evaluation on held-out prompts: ``async-rlhf evaluate``. Samples as ``generate`` does, then judges.

    Rows may have `reference_response` or `query_reference_response`, the human answers.
    """

    generations: str | None = key(None, main="data and models")
    """The output folder of ``generate`` to judge, instead of models or a run with data."""
    reference: str | None = key(None, main="judging")
    """The name of the model that win-rates and KL are taken against; null for the first."""
    ref_model: str | None = None
    """A folder or hub name: KL and perplexity are taken under this model instead."""
    reward_model: str | None = key(None, main="judging")
    """The gold reward: a reward model, or else reward_funcs or judge."""
    reward_model_bits: Literal[4, 8] | None = None
    """Hold the reward model's linear layers, except its head, in so many bits, with bitsandbytes; null for all of
    them."""
    reward_funcs: list[str] = key([], main="judging")
    """The gold reward as functions, as in ``train``."""
    judge: JudgeConfig = key(JudgeConfig)
    """A language model that compares completions, in place of a gold reward."""
    reward_tokenizer: str | None = None
    """Tokenizer of the reward model; null takes the one saved with it."""
    penalties: Literal["training"] | None = None
    """ "training" scores answers as the run did that trained the models, with its penalties for what is cut off and for
    length, by the run.yml beside them; null leaves penalties out, and says what they would change."""
    num_samples: int = key(10, at_least(0), main="judging")
    """Prompts shown side by side."""
    track: bool = key(True, role="log")
    """With run, log the results of its checkpoints in the same runs of W&B, TensorBoard, MLflow or trackio, each at its
    batch; report_to of the training says which."""

    def check(self) -> None:
        if self.generations is None:
            super().check()
        else:
            right = "must be left out with generations, which were sampled already"
            require(not self.models, "models", self.models, right)
            require(self.run is None, "run", self.run, right)
            for name in (
                "data",
                "split",
                "prompt_field",
                "prompt_words",
                "eval_fraction",
                "temperature",
                "top_p",
                "top_k",
                "response_length",
                "max_prompt_length",
                "engine",
                "seed",
                "checkpoints",
            ):
                value = getattr(self, name)
                default = [] if name == "checkpoints" else type(self).__dataclass_fields__[name].default
                require(value == default, name, value, right)
        check_device(self.device, self.parallel.ranks)
        known = self.reference is None or not self.models or self.run is not None or self.reference in self.models
        right = f"must be one of the models: {', '.join(self.models)}"
        require(known, "reference", self.reference, right)
        if self.judge.url is None:
            check_one_judge(self.reward_model, self.reward_funcs)
            right = "must be null without reward_model"
            alone = self.reward_model is not None or self.reward_tokenizer is None
            require(alone, "reward_tokenizer", self.reward_tokenizer, right)
            check_bits(self.reward_model_bits, self.reward_model)
        else:
            right = "must be left out with judge.url"
            require(self.penalties is None, "penalties", self.penalties, right)
            for name in ("reward_model", "reward_model_bits", "reward_tokenizer"):
                require(getattr(self, name) is None, name, getattr(self, name), right)
            require(not self.reward_funcs, "reward_funcs", self.reward_funcs, right)
