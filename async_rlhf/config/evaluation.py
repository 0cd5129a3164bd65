"""Configuration of generation for evaluation, and of evaluation itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from async_rlhf.config.base import Checked, require
from async_rlhf.config.generation import Dtype, VLLMConfig, check_temperature
from async_rlhf.config.online import MAX_SEED
from async_rlhf.config.rewards import JudgeConfig, check_one_judge


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(Checked):
    """Models that answer held-out prompts, and how.

    Args:
        models: name -> folder or hub name, e.g. {"sft": "runs/sft", "policy": "runs/policy"}.
        run: the output folder of ``train``: all its checkpoints and its final model, under those names.
        checkpoints: of ``run``, only these, e.g. ["checkpoint-128", "final"]; empty for all.
        data: rows with `query` (see prompt_field).
        split: the split to take where there are several.
        prompt_field: the column with the prompt, as text or as messages of a chat.
        output_dir: where the results go.
        engine: "transformers" or "vllm".
        temperature: of sampling, and of the log-probabilities in the KL; with generations, that which they have.
        response_length: most new tokens.
        max_prompts: take only so many prompts; null for all.
        max_prompt_length: prompts with more tokens are dropped, and counted.
        batch_size: completions decoded together.
        dtype: of the weights that sample.
        vllm: options of vLLM.
        seed: of sampling.
        device: e.g. "cuda:0"; null takes the first GPU, or the CPU.
        trust_remote_code: run Python code that comes with a model; false makes it an error that a model needs that.
        overwrite: do it again where it is done already.
    """

    models: dict[str, str] = field(default_factory=dict)
    run: str | None = None
    checkpoints: list[str] = field(default_factory=list)
    data: str = ""
    split: str = "validation"
    prompt_field: str = "query"
    output_dir: str
    engine: Literal["transformers", "vllm"] = "transformers"
    temperature: float = 0.7
    response_length: int = 53
    max_prompts: int | None = None
    max_prompt_length: int = 512
    batch_size: int = 256
    dtype: Dtype = "float32"
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    seed: int = 0
    device: str | None = None
    trust_remote_code: bool = False
    overwrite: bool = False

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
        self.at_least(1, "response_length", "max_prompts", "max_prompt_length", "batch_size")
        self.is_device("device")
        check_temperature(self.temperature)
        self.at_most(MAX_SEED, "numpy's generators take no larger", "seed")
        self.is_folder("output_dir")
        right = 'must be left out unless engine is "vllm"'
        require(self.engine == "vllm" or self.vllm == VLLMConfig(), "vllm", self.vllm, right)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(HeldOutConfig):
    """Completions of held-out prompts by several models: ``async-rlhf generate``.

    Writes ``<name>.jsonl`` for every model. What is written already is not sampled again, within a file as well.
    """


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(HeldOutConfig):
    """Evaluation on held-out prompts: ``async-rlhf evaluate``. Samples as ``generate`` does, then judges.

    Rows may have `reference_response` or `query_reference_response`, the human answers.

    Args:
        generations: the output folder of ``generate`` to judge, instead of models or a run with data.
        reference: the name of the model that win-rates and KL are taken against; null for the first.
        ref_model: a folder or hub name: KL and perplexity are taken under this model instead.
        reward_model: the gold reward: a reward model,
        reward_funcs: or functions, as in ``train``,
        judge: or a language model that compares.
        reward_tokenizer: of the reward model; null takes the one beside it.
        num_samples: prompts shown side by side.
    """

    generations: str | None = None
    reference: str | None = None
    ref_model: str | None = None
    reward_model: str | None = None
    reward_funcs: list[str] = field(default_factory=list)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    reward_tokenizer: str | None = None
    num_samples: int = 10

    def check(self) -> None:
        if self.generations is None:
            super().check()
        else:
            right = "must be left out with generations, which were sampled already"
            require(not self.models, "models", self.models, right)
            require(self.run is None, "run", self.run, right)
            for key in (
                "data",
                "split",
                "prompt_field",
                "temperature",
                "response_length",
                "max_prompt_length",
                "engine",
                "seed",
                "checkpoints",
            ):
                value = getattr(self, key)
                default = [] if key == "checkpoints" else type(self).__dataclass_fields__[key].default
                require(value == default, key, value, right)
        self.at_least(0, "num_samples")
        known = self.reference is None or not self.models or self.run is not None or self.reference in self.models
        right = f"must be one of the models: {', '.join(self.models)}"
        require(known, "reference", self.reference, right)
        if self.judge.url is None:
            check_one_judge(self.reward_model, self.reward_funcs)
            right = "must be null without reward_model"
            alone = self.reward_model is not None or self.reward_tokenizer is None
            require(alone, "reward_tokenizer", self.reward_tokenizer, right)
        else:
            right = "must be left out with judge.url"
            for key in ("reward_model", "reward_tokenizer"):
                require(getattr(self, key) is None, key, getattr(self, key), right)
            require(not self.reward_funcs, "reward_funcs", self.reward_funcs, right)
