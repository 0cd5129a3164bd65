"""Configuration of the supervised stages: demonstrations, preference pairs, reward models."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_rlhf.config.base import Checked, require
from async_rlhf.config.generation import Dtype, check_temperature
from async_rlhf.config.online import MAX_LEARNING_RATE, MAX_LEARNING_RATE_WHY, MAX_SEED, AdapterConfig, LRSchedule
from async_rlhf.config.rewards import check_one_judge


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
        self.at_most(10**6, "a new model is a small one", "vocab_size", "hidden_size", "max_positions")
        self.at_most(1000, "a new model is a small one", "num_layers")
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
        learning_rate: peak rate of AdamW.
        warmup_ratio: share of the steps with rising rate.
        warmup_steps: so many steps with rising rate instead; 0 for warmup_ratio.
        weight_decay: of AdamW.
        per_device_train_batch_size: rows (for pairs: pairs) of one forward and backward pass.
        gradient_accumulation_steps: such passes per optimiser step.
        max_length: rows with more tokens are dropped, and counted.
        bf16: bfloat16 autocast.
        gradient_checkpointing: trade compute for memory.
        lr_scheduler_type: transformers' schedule of that name.
        eval_steps: optimiser steps between two losses on the held-out data, below 1 a share of all steps; 0 for one at
            the end only.
        lora: train low-rank adapters instead of every weight; they are merged into the model that is saved. A language
            model's are saved beside it as well; a reward model's alone would lack its head.
        logging_steps: optimiser steps between two lines in the log, below 1 a share of all steps.
        report_to: transformers' integrations, e.g. ["wandb"].
        seed: decides order and initialisation.
        trust_remote_code: run Python code that comes with the model; false makes it an error that a model needs that.
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
    warmup_steps: int = 0
    weight_decay: float = 0.0
    per_device_train_batch_size: int = 32
    gradient_accumulation_steps: int = 1
    max_length: int = 512
    bf16: bool = False
    gradient_checkpointing: bool = False
    lr_scheduler_type: LRSchedule = "linear"
    eval_steps: float = 0
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    logging_steps: float = 20
    report_to: list[str] = field(default_factory=list)
    seed: int = 0
    trust_remote_code: bool = False
    overwrite: bool = False

    def check(self) -> None:
        self.above(0, "num_epochs", "learning_rate")
        self.at_most(MAX_LEARNING_RATE, MAX_LEARNING_RATE_WHY, "learning_rate")
        self.at_most(MAX_SEED, "numpy's generators take no larger", "seed")
        self.at_most(1e6, "so many passes never end", "num_epochs")
        self.is_folder("output_dir")
        self.at_least(0, "warmup_ratio", "warmup_steps", "weight_decay", "eval_steps", "seed")
        require(self.warmup_ratio < 1, "warmup_ratio", self.warmup_ratio, "must be below 1, a share of the steps")
        self.at_least(1, "per_device_train_batch_size", "gradient_accumulation_steps", "max_length")
        self.above(0, "logging_steps")
        for key in ("eval_steps", "logging_steps"):
            value = getattr(self, key)
            require(
                value < 1 or value == int(value), key, value, "must be a whole number, or below 1 a share of all steps"
            )
        require(self.eval_steps == 0 or self.eval is not None, "eval_steps", self.eval_steps, "must be 0 without eval")


@dataclass(frozen=True)
class SFTConfig(StageConfig):
    """Supervised fine-tuning: ``async-rlhf sft``. Rows have `query_reference_response` and maybe `query`, its start; or
    `prompt` and `completion`; or `messages`, a chat that ends with the assistant's answer; or `text`.

    Args:
        model: the model to start from, a folder or a name on the hub; null makes a new one.
        new_model: size of the new one.
        completion_only: train on the response alone; false trains on prompts too.
    """

    model: str | None = None
    new_model: NewModelConfig = field(default_factory=NewModelConfig)
    completion_only: bool = True


@dataclass(frozen=True)
class PairsConfig(Checked):
    """Preference pairs from a model's own samples, judged by a reward: ``async-rlhf pairs``.

    Args:
        model: the model that samples, a folder or a name on the hub.
        prompts: rows with `query` (see prompt_field): a file, a folder, or a name on the hub.
        output: the .jsonl file to write, with `prompt`, `chosen`, `rejected` and the two scores.
        split: the split to take where there are several.
        prompt_field: the column with the prompt, as text or as messages of a chat.
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
        trust_remote_code: run Python code that comes with a model; false makes it an error that a model needs that.
        overwrite: do it again where it is done already.
    """

    model: str
    prompts: str
    output: str
    split: str = "train"
    prompt_field: str = "query"
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
    trust_remote_code: bool = False
    overwrite: bool = False

    def check(self) -> None:
        check_one_judge(self.reward_model, self.reward_funcs)
        self.at_least(2, "samples_per_prompt")
        require(
            1 <= self.pairs_per_prompt <= self.samples_per_prompt // 2,
            "pairs_per_prompt",
            self.pairs_per_prompt,
            f"must be 1 to {self.samples_per_prompt // 2}: half of samples_per_prompt",
        )
        self.at_least(1, "response_length", "max_prompts", "max_prompt_length", "batch_size")
        self.is_device("device")
        check_temperature(self.temperature)
        self.at_most(MAX_SEED, "numpy's generators take no larger", "seed")


@dataclass(frozen=True)
class RewardConfig(StageConfig):
    """Reward model from preference pairs: ``async-rlhf reward``. Rows have `prompt`, `chosen` and `rejected`, as text
    or as messages of a chat; `prompt` may be missing where both sides are whole chats.

    Args:
        model: the language model to start from, a folder or a name on the hub.
        eval_fraction: share of the training pairs held out for the reported accuracy where `eval` is null; pairs
            of one prompt stay together.
        center: move the score of the trained model by a constant, so that its mean over the reference data is 0. It is
            added to the bias of the last normalisation, so that every program that loads the model has it; a model
            without one (Llama) is left as it is, with a warning.
        reference: the reference data, rows as for ``sft``; null takes the chosen side of the training pairs.
        reference_split: the split to take where there are several.
        center_rewards_coefficient: weight of (score(chosen) + score(rejected))^2 in the loss, which keeps scores near 0
            (Eisenstein et al., arXiv 2312.09244); 0 for none.
    """

    model: str = ""
    eval_fraction: float = 0.1
    center: bool = True
    reference: str | None = None
    reference_split: str = "train"
    center_rewards_coefficient: float = 0.0

    def check(self) -> None:
        super().check()
        require(self.model != "", "model", self.model, "give the model to start from")
        self.at_least(0, "center_rewards_coefficient")
        right = "must be null without center"
        require(self.center or self.reference is None, "reference", self.reference, right)
        require(0 < self.eval_fraction < 1, "eval_fraction", self.eval_fraction, "must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class RelabelConfig(Checked):
    """Preference pairs labelled anew by a gold reward: ``async-rlhf relabel``. Rows as for ``reward``.

    Args:
        data: a .jsonl, .json, .parquet or .csv file, a folder, or a name on the hub.
        output_dir: where ``<split>.jsonl`` goes for every split; ``data`` of other commands may name the folder.
        splits: of the data; a file has one, under the name given here.
        reward_model: the gold reward: a reward model, a folder or a name on the hub,
        reward_funcs: or functions, as in ``train``.
        reward_tokenizer: of the reward model; null takes the one beside it. Functions need one for chats alone, whose
            template makes text of them.
        keep_ties: keep pairs of equal scores, as they were; false drops them. They are counted either way.
        batch_size: rows of one pass of the reward model.
        dtype: of the reward model.
        device: e.g. "cuda:0"; null takes the first GPU, or the CPU.
        trust_remote_code: run Python code that comes with a model; false makes it an error that a model needs that.
        overwrite: do it again where it is done already.
    """

    data: str
    output_dir: str
    splits: list[str] = field(default_factory=lambda: ["train"])
    reward_model: str | None = None
    reward_funcs: list[str] = field(default_factory=list)
    reward_tokenizer: str | None = None
    keep_ties: bool = False
    batch_size: int = 32
    dtype: Dtype = "float32"
    device: str | None = None
    trust_remote_code: bool = False
    overwrite: bool = False

    def check(self) -> None:
        check_one_judge(self.reward_model, self.reward_funcs)
        require(len(self.splits) > 0, "splits", self.splits, "name at least one")
        require(len(set(self.splits)) == len(self.splits), "splits", self.splits, "must name each once")
        self.at_least(1, "batch_size")
        self.is_folder("output_dir")
        self.is_device("device")
