"""Configuration of the commands: one frozen dataclass for each."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from typing import Literal, get_type_hints

from async_rlhf.config.algorithms import ALGORITHM_CONFIGS, OnlineDPOConfig
from async_rlhf.config.base import Checked, require
from async_rlhf.config.online import OnlineConfig

GOLD_REWARD = "async_rlhf.data.docstring_reward:gold_rewards"


def _check_functions(functions: list[str], key: str = "reward_funcs") -> None:
    for name in functions:
        require(":" in name, key, name, 'must be "module:function" or "path/to/file.py:function"')


@dataclass(frozen=True)
class DataConfig(Checked):
    """Where prompts come from.

    Args:
        train: a .jsonl, .json, .parquet or .csv file, a folder written by datasets, or a name on the hub.
        eval: the same, for held-out prompts; null for none.
        prompt_field: the column with the prompt.
        train_split: the split to take where there are several.
        eval_split: the same, for held-out prompts.
    """

    train: str
    eval: str | None = None
    prompt_field: str = "query"
    train_split: str = "train"
    eval_split: str = "validation"


@dataclass(frozen=True)
class RunConfig(Checked):
    """Online training: ``async-rlhf train``.

    Args:
        model: the policy to start from, a folder or a name on the hub.
        data: where prompts come from.
        reward_model: a sequence-classification model with one output, a folder or a name on the hub.
        reward_funcs: instead of or beside it, Python functions as "module:function" or "file.py:function",
            called as f(prompts=..., completions=..., **columns) and returning one number per completion. They may be
            async; all are called at the same time.
        ref_model: the reference policy; null takes the policy's starting weights.
        value_model: the value model that PPO starts from, such as the value_model folder of an earlier run's
            checkpoint; null takes the reward model.
        tokenizer: a folder or a name on the hub; null takes the policy's.
        callbacks: transformers' callbacks as "module:Class" or "file.py:Class".
        train: everything about the training itself; the keys depend on the algorithm.
        algorithm: the objective.
    """

    model: str
    data: DataConfig
    reward_model: str | None = None
    reward_funcs: list[str] = field(default_factory=list)
    ref_model: str | None = None
    value_model: str | None = None
    tokenizer: str | None = None
    callbacks: list[str] = field(default_factory=list)
    train: OnlineConfig = field(default_factory=OnlineDPOConfig)
    algorithm: Literal["online_dpo", "best_of_k", "rloo", "ppo", "grpo"] = "online_dpo"

    @staticmethod
    def of(algorithm: str) -> type[RunConfig]:
        """This class with the ``train`` keys of one algorithm, for parsing."""
        kind, hint = ALGORITHM_CONFIGS[algorithm], get_type_hints(RunConfig)["algorithm"]
        fields = [("train", kind, field(default_factory=kind)), ("algorithm", hint, field(default=algorithm))]
        namespace = {"__doc__": RunConfig.__doc__}
        return make_dataclass("RunConfig", fields, bases=(RunConfig,), frozen=True, namespace=namespace)

    @property
    def overwrite(self) -> bool:
        """Train again where that is done already."""
        return self.train.overwrite_output_dir

    def check(self) -> None:
        kind = ALGORITHM_CONFIGS[self.algorithm]
        right = f"must be a {kind.__name__} with algorithm {self.algorithm!r}"
        require(isinstance(self.train, kind), "train", type(self.train).__name__, right)
        right = 'must be null: only "ppo" has a value model'
        require(self.value_model is None or self.algorithm == "ppo", "value_model", self.value_model, right)
        _check_functions(self.reward_funcs)
        _check_functions(self.callbacks, "callbacks")
        weights, functions = self.train.reward_weights, self.reward_funcs
        right = f"must be empty, or one number for each of the {len(functions)} of reward_funcs"
        require(len(weights) in (0, len(functions)), "train.reward_weights", weights, right)
        require(
            self.train.eval_steps == 0 or self.data.eval is not None,
            "train.eval_steps",
            self.train.eval_steps,
            "must be 0 without data.eval",
        )
        require(
            self.reward_model is not None or len(self.reward_funcs) > 0,
            "reward_model",
            self.reward_model,
            "give a reward_model, reward_funcs, or both",
        )


@dataclass(frozen=True)
class ReplayConfig(Checked):
    """Repeat a run from its record: ``async-rlhf replay RUN``. Needed for bounded staleness; exact runs repeat anyway.

    Args:
        run: the output folder of a run of ``async-rlhf train``.
        output_dir: where the repetition goes; null for the folder "replay" within it.
        overwrite: delete what an earlier replay left there.
    """

    run: str
    output_dir: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class NewModelConfig(Checked):
    """A small GPT-NeoX (the Pythia architecture) made from nothing, with a byte-level BPE tokenizer.

    Args:
        vocab_size: of the tokenizer, trained on the stage's own texts.
        hidden_size: width of the residual stream.
        num_layers: transformer blocks.
        num_heads: attention heads.
        max_positions: longest sequence.
    """

    vocab_size: int = 1536
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    max_positions: int = 256

    def check(self) -> None:
        self.at_least(1, "hidden_size", "num_layers", "num_heads", "max_positions")
        self.at_least(300, "vocab_size")
        require(
            self.hidden_size % self.num_heads == 0,
            "hidden_size",
            self.hidden_size,
            f"must be a multiple of num_heads ({self.num_heads})",
        )


@dataclass(frozen=True)
class StageConfig(Checked):
    """What the supervised stages share.

    Args:
        train: training data: a .jsonl, .json, .parquet or .csv file, a datasets folder, or a name on the hub.
        output_dir: where the trained model goes.
        eval: held-out data in the same format; null for none.
        train_split: the split to take where there are several.
        eval_split: the same, for held-out data.
        num_epochs: passes over the data.
        learning_rate: peak rate of AdamW, with linear decay.
        warmup_ratio: share of the steps with rising rate.
        weight_decay: of AdamW.
        per_device_train_batch_size: rows (for pairs: pairs) of one forward and backward pass.
        gradient_accumulation_steps: such passes per optimiser step.
        max_length: rows with more tokens are dropped, and counted.
        bf16: bfloat16 autocast.
        logging_steps: optimiser steps between two lines in the log.
        report_to: transformers' integrations, e.g. ["wandb"].
        seed: decides order and initialisation.
        overwrite: do the stage again where it is done already.
    """

    train: str
    output_dir: str
    eval: str | None = None
    train_split: str = "train"
    eval_split: str = "validation"
    num_epochs: float = 1.0
    learning_rate: float = 1e-3
    warmup_ratio: float = 0.05
    weight_decay: float = 0.0
    per_device_train_batch_size: int = 32
    gradient_accumulation_steps: int = 1
    max_length: int = 512
    bf16: bool = False
    logging_steps: int = 20
    report_to: list[str] = field(default_factory=list)
    seed: int = 0
    overwrite: bool = False

    def check(self) -> None:
        self.above(0, "num_epochs", "learning_rate")
        self.at_least(0, "warmup_ratio", "weight_decay", "seed")
        require(self.warmup_ratio < 1, "warmup_ratio", self.warmup_ratio, "must be below 1, a share of the steps")
        self.at_least(1, "per_device_train_batch_size", "gradient_accumulation_steps", "max_length")
        self.at_least(1, "logging_steps")


@dataclass(frozen=True)
class SFTConfig(StageConfig):
    """Supervised fine-tuning: ``async-rlhf sft``. Rows have `query_reference_response`, and `query` if only the
    response is to be trained on.

    Args:
        model: the model to start from, a folder or a name on the hub; null makes a new one.
        new_model: size of the new one.
        completion_only: train on the response alone; rows need `query`, the start of the text.
    """

    model: str | None = None
    new_model: NewModelConfig = field(default_factory=NewModelConfig)
    completion_only: bool = True


@dataclass(frozen=True)
class PairsConfig(Checked):
    """Preference pairs from a model's own samples, judged by a reward: ``async-rlhf pairs``.

    Args:
        model: the model that samples, a folder or a name on the hub.
        prompts: rows with `query`: a file, a datasets folder, or a name on the hub.
        output: the .jsonl file to write, with `prompt`, `chosen`, `rejected` and the two scores.
        split: the split to take where there are several.
        reward_model: what judges: a reward model,
        reward_funcs: or functions, as in ``train``.
        samples_per_prompt: completions per prompt.
        pairs_per_prompt: the best against the worst, the second best against the second worst, and so on; ties are
            dropped.
        temperature: of sampling.
        response_length: most new tokens.
        max_prompts: take only so many prompts; null for all.
        max_prompt_length: prompts with more tokens are dropped, and counted.
        batch_size: completions decoded together.
        seed: of sampling.
        device: e.g. "cuda:0"; null takes the first GPU, or the CPU.
        overwrite: do it again where it is done already.
    """

    model: str
    prompts: str
    output: str
    split: str = "train"
    reward_model: str | None = None
    reward_funcs: list[str] = field(default_factory=list)
    samples_per_prompt: int = 2
    pairs_per_prompt: int = 1
    temperature: float = 0.7
    response_length: int = 53
    max_prompts: int | None = None
    max_prompt_length: int = 512
    batch_size: int = 256
    seed: int = 0
    device: str | None = None
    overwrite: bool = False

    def check(self) -> None:
        _check_functions(self.reward_funcs)
        self.at_least(2, "samples_per_prompt")
        require(
            1 <= self.pairs_per_prompt <= self.samples_per_prompt // 2,
            "pairs_per_prompt",
            self.pairs_per_prompt,
            f"must be 1 to {self.samples_per_prompt // 2}: half of samples_per_prompt",
        )
        self.at_least(1, "response_length", "max_prompts", "max_prompt_length", "batch_size")
        self.is_device("device")
        self.above(0, "temperature")
        require(
            (self.reward_model is not None) != (len(self.reward_funcs) > 0),
            "reward_model",
            self.reward_model,
            "give either a reward_model or reward_funcs",
        )


@dataclass(frozen=True)
class RewardConfig(StageConfig):
    """Reward model from preference pairs: ``async-rlhf reward``. Rows have `prompt`, `chosen`, `rejected`.

    Args:
        model: the language model to start from, a folder or a name on the hub.
        eval_fraction: share of the training pairs held out for the reported accuracy where `eval` is null; pairs
            of one prompt stay together.
    """

    model: str = ""
    eval_fraction: float = 0.1

    def check(self) -> None:
        super().check()
        require(self.model != "", "model", self.model, "give the model to start from")
        require(0 < self.eval_fraction < 1, "eval_fraction", self.eval_fraction, "must be between 0 and 1")


@dataclass(frozen=True)
class EvaluateConfig(Checked):
    """Evaluation on held-out prompts by a gold reward: ``async-rlhf evaluate``.

    Args:
        models: name -> folder or hub name, e.g. {"sft": "runs/sft", "policy": "runs/policy"}.
        data: rows with `query` and `reference_response` (or `query_reference_response`).
        output_dir: where evaluation.json and samples.jsonl go.
        split: the split to take where there are several.
        reference: the name of the model that win-rates and KL are taken against; null for the first.
        reward_model: the gold reward: a reward model,
        reward_funcs: or functions, as in ``train``.
        temperature: of sampling, and of the log-probabilities in the KL.
        response_length: most new tokens.
        max_prompts: take only so many prompts; null for all.
        max_prompt_length: prompts with more tokens are dropped, and counted.
        batch_size: completions decoded together.
        num_samples: prompts shown side by side.
        seed: of sampling.
        device: e.g. "cuda:0"; null takes the first GPU, or the CPU.
        overwrite: do it again where it is done already.
    """

    models: dict[str, str]
    data: str
    output_dir: str
    split: str = "validation"
    reference: str | None = None
    reward_model: str | None = None
    reward_funcs: list[str] = field(default_factory=list)
    temperature: float = 0.7
    response_length: int = 53
    max_prompts: int | None = None
    max_prompt_length: int = 512
    batch_size: int = 256
    num_samples: int = 10
    seed: int = 0
    device: str | None = None
    overwrite: bool = False

    def check(self) -> None:
        _check_functions(self.reward_funcs)
        require(len(self.models) > 0, "models", self.models, "give at least one, as name: folder")
        self.at_least(1, "response_length", "max_prompts", "max_prompt_length", "batch_size")
        self.is_device("device")
        self.at_least(0, "num_samples")
        self.above(0, "temperature")
        require(
            self.reference is None or self.reference in self.models,
            "reference",
            self.reference,
            f"must be one of the models: {', '.join(self.models)}",
        )
        require(
            (self.reward_model is not None) != (len(self.reward_funcs) > 0),
            "reward_model",
            self.reward_model,
            "give either a reward_model or reward_funcs",
        )
