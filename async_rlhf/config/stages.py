"""Configuration of the supervised stages: demonstrations, preference pairs, reward models."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Literal

from async_rlhf.config.base import EACH_ONCE, FILE, FOLDER, REQUIRED, Checked, Rule, configuration, key
from async_rlhf.config.common import (
    COLUMN,
    SCORE,
    SHARE,
    OnRanksConfig,
    RepeatableConfig,
    RewardedConfig,
    RewardTokensConfig,
    SamplingConfig,
    TrainingConfig,
    TrainRowsConfig,
)
from async_rlhf.config.generation import Dtype, GenerationConfig
from async_rlhf.config.online import AdapterConfig, OnlineConfig

_SMALL = "a new model is a small one"
_STEPS = Rule(lambda value: value < 1 or value == int(value), "must be a whole number, or below 1 a share of all steps")


@configuration
class NewModelConfig(Checked):
    """A small language model made from scratch, with a byte-level BPE tokenizer unless another is given."""

    vocab_size: int = key(1536, ge=300, le=10**6, why=_SMALL)
    """Vocabulary of the tokenizer, which is trained on the stage's own texts; with tokenizer, its own is taken."""
    hidden_size: int = key(128, ge=1, le=10**6, why=_SMALL)
    """Width of the residual stream."""
    num_layers: int = key(3, ge=1, le=1000, why=_SMALL)
    """Transformer blocks."""
    num_heads: int = key(4, ge=1)
    """Attention heads."""
    max_positions: int = key(256, ge=1, le=10**6, why=_SMALL)
    """Longest sequence."""
    architecture: Literal["gpt_neox", "llama", "qwen2", "qwen3"] = "gpt_neox"
    """The body, as transformers names it: "gpt_neox" (Pythia), "llama", "qwen2" or "qwen3"."""

    def check(self) -> None:
        rule = f"must be a multiple of num_heads ({self.num_heads})"
        self.require(self.hidden_size % self.num_heads == 0, "hidden_size", rule)
        rule = (
            f"must be an even multiple of num_heads ({self.num_heads}): rotary positions turn pairs of a head's numbers"
        )
        self.require(self.hidden_size // self.num_heads % 2 == 0, "hidden_size", rule)


@configuration
class StageConfig(TrainRowsConfig, TrainingConfig, RepeatableConfig):
    """What the supervised stages share."""

    output_dir: str = key(REQUIRED, *FOLDER, role="place", main="output")
    """Where the trained model goes."""
    num_epochs: float = key(1.0, gt=0, le=1e6, why="so many passes never end", main="training")
    """Passes over the data."""
    learning_rate = key(1e-3)
    """Peak rate of AdamW."""
    warmup_ratio: float = key(0.05, ge=0, lt=1, why="a share of the steps")
    """Share of the steps in which the rate rises, where warmup_steps is 0."""
    per_device_train_batch_size: int = key(32, ge=1, main="training")
    """Rows (for pairs: pairs) of one forward and backward pass; with max_tokens_per_pass only a factor of the batch."""
    gradient_accumulation_steps = key(1)
    """Such passes per optimiser step and rank: a batch is per_device_train_batch_size x gradient_accumulation_steps x
    parallel.ranks rows."""
    max_length: int = key(512, ge=1, main="training")
    """Rows with more tokens are dropped, and counted."""
    gradient_checkpointing: Literal["selective", True, False] = False
    """Trade compute for memory; "selective" keeps matrix products and attention."""
    eval_steps: float = key(0, _STEPS, ge=0, may_change="evaluation trains nothing")
    """Optimiser steps between two evaluations of the loss on held-out data, below 1 a share of all steps; 0 evaluates
    at the end only."""
    lora: AdapterConfig = key(AdapterConfig)
    """Train low-rank adapters instead of every weight; they are merged into the saved model. A language model's
    adapters are also saved beside it; a reward model's are not, as they would lack the head."""
    logging_steps: float = key(20, _STEPS, gt=0, role="log")
    """Optimiser steps between two lines in the log, below 1 a share of all steps."""
    save_steps: int | None = key(None, ge=0, role="place")
    """Optimiser steps between two checkpoints, of which the newest is kept until the stage is done; 0 for none,
    null for a tenth of all."""
    seed = key(0, main="training")
    """Seed of order and initialisation, and of what a model draws while it trains, such as noise on routers."""

    def check(self) -> None:
        super().check()
        held_out = self.eval is not None or self.held_out_share is not None
        self.require(self.eval_steps == 0 or held_out, "eval_steps", "must be 0 without eval or eval_fraction")
        self.parallel.require_format(self.checkpoint_format)

    def steps_per_epoch(self, rows: int) -> int:
        """Optimiser steps of a pass over so many rows, or pairs."""
        return math.ceil(rows / self.batch_size)

    def for_learner(self, rows: int, folder: str) -> OnlineConfig:
        """What the learner and the loop are told: an optimiser step is a batch.

        Args:
            rows: to train on, or pairs.
            folder: where checkpoints and logs go.
        """
        steps = math.ceil(self.num_epochs * self.steps_per_epoch(rows))
        same = (
            *("max_tokens_per_pass", "learning_rate", "lr_scheduler_type", "weight_decay", "bf16", "report_to"),
            *("gradient_checkpointing", "save_steps", "seed", "device", "parallel", "trust_remote_code"),
            *("checkpoint_format", "export_dtype"),
        )
        by_tokens = self.max_tokens_per_pass not in (None, "on_gpu")
        return OnlineConfig(
            output_dir=folder,
            batches=steps,
            samples_per_prompt=1,
            completions_per_batch=self.batch_size,
            per_device_train_batch_size=None if by_tokens else self.per_device_train_batch_size,
            warmup_steps=self.warmup_steps or math.ceil(self.warmup_ratio * steps),
            logging_steps=_whole(self.logging_steps, steps),
            eval_steps=_whole(self.eval_steps, steps),
            save_total_limit=1,
            staleness=0,
            generation=GenerationConfig(temperature=1.0),
            **{name: getattr(self, name) for name in same},
        )

    @property
    def batch_size(self) -> int:
        """Rows, or pairs, of one optimiser step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.parallel.ranks

    @property
    def held_out_share(self) -> float | None:
        """The share of the training data that is held out, unless eval is given; None for none."""
        return self.eval_fraction


def _whole(every: float, steps: int) -> int:
    """A number of steps that may be a share of all."""
    return int(every) if every >= 1 else math.ceil(every * steps)


@configuration(kw_only=True)
class SFTConfig(StageConfig):
    """Supervised fine-tuning: ``async-rlhf sft``. Rows have `query_reference_response` and maybe `query`, its start; or
    `prompt` and `completion`; or `messages`, a chat that ends with the assistant's answer; or `text`.
    """

    model: str | None = key(None, main="data and models", names="model")
    """The model to start from, a folder or a name on the hub (owner/model or owner/model@revision); null makes
    a new one."""
    new_model: NewModelConfig = key(NewModelConfig)
    """Architecture and size of the new model."""
    tokenizer: str | None = key(None, names="source")
    """The new model's tokenizer, a folder or a name on the hub; null trains one on the stage's texts."""
    chat_template: str | None = key(None, Rule(lambda text: text.strip() != "", "must not be empty"), names="template")
    """How chats become text: "chatml", a Jinja file, or Jinja text; null takes the tokenizer's. Its special tokens are
    added to the vocabulary, and the one that it writes after an answer becomes the end of sequence."""
    completion_only: bool = key(True, main="training")
    """Train on the response alone; false trains on prompts too."""
    learn: Literal["all", "last"] = "all"
    """Which of the assistant's answers in a chat are trained on, with their reasoning and calls."""
    min_score: float | None = None
    """Train only on rows whose `score` is at least this, such as a run's rollouts; null for all."""
    best_of_prompt: bool = key(False, main="training")
    """Train only on the row with the best `score` of each prompt: rejection sampling."""

    def check(self) -> None:
        super().check()
        alone = self.model is None or self.tokenizer is None
        self.require(alone, "tokenizer", "must be null with model, which has its own")
        if self.model is not None:
            self.leaves_out([f"new_model.{item.name}" for item in fields(NewModelConfig)], "with model: none is made")
        if self.tokenizer is not None:
            self.new_model.leaves_out(["vocab_size"], "with tokenizer, whose vocabulary is the model's", "new_model.")


@configuration
class PairsConfig(SamplingConfig, RewardedConfig):
    """Preference pairs from a model's own samples, judged by a reward, or from ratings: ``async-rlhf pairs``."""

    model: str | None = key(None, main="data and models", names="model")
    """The model that samples, a folder or a name on the hub (owner/model or owner/model@revision)."""
    prompts: str | None = key(None, main="data and models", names="data")
    """Rows with `query` (see prompt_field): a file, a folder, or a name on the hub."""
    output: str = key("", Rule(bool, "name the .jsonl file to write"), *FILE, role="place", main="output")
    """The .jsonl file to write, with `prompt`, `chosen`, `rejected` and the two scores."""
    split: str = "train"
    """The split to take where there are several."""
    samples_per_prompt: int = key(2, ge=2, main="sampling")
    """Completions per prompt."""
    pairs_per_prompt: int = key(1, main="sampling")
    """The best against the worst, the second best against the second worst, and so on; ties are dropped."""
    from_ratings: str | None = key(None, main="data and models", names="data")
    """Instead of sampling, draw pairs from rated rows: `prompt` and `completion`, or `text`, with a `score`. A pair has
    one prompt; texts without a prompt are paired with each other."""
    score_field: str = key(SCORE, COLUMN)
    """The column with the rating, a number."""
    margin: float = key(0.0, ge=0)
    """Least difference of the two ratings of a pair; equal ratings never make one."""
    max_pairs: int | None = key(None, ge=1)
    """Draw this many of all possible pairs; null for as many as there are rows."""
    eval_fraction: float = key(0.1, SHARE)
    """No pair joins a text that ``reward`` holds out with this eval_fraction to one that it trains on."""

    def check(self) -> None:
        if self.from_ratings is not None:
            self.leaves_out(SAMPLED, "with from_ratings: nothing is sampled")
            return
        self.leaves_out(RATED, "without from_ratings")
        super().check()
        self.require(self.model is not None, "model", "give the model that samples, or from_ratings")
        self.require(self.prompts is not None, "prompts", "give a file, a folder, or a name on the hub")
        self.check_judge()
        most = self.samples_per_prompt // 2
        rule = f"must be 1 to {most}: half of samples_per_prompt"
        self.require(1 <= self.pairs_per_prompt <= most, "pairs_per_prompt", rule)


SAMPLED = (
    *("model", "prompts", "prompt_field", "reward_model", "reward_funcs"),
    *("samples_per_prompt", "pairs_per_prompt"),
    *("temperature", "top_p", "top_k", "response_length", "max_prompts", "max_prompt_length", "batch_size", "device"),
    *("parallel", "trust_remote_code"),
)
"""Keys of PairsConfig that mean nothing where pairs are drawn from ratings."""
RATED = ("score_field", "margin", "max_pairs", "eval_fraction")
"""Keys that mean nothing where pairs are sampled."""


@configuration(kw_only=True)
class RewardConfig(StageConfig):
    """Reward model from preference pairs or from ratings: ``async-rlhf reward``. Rows have `prompt`, `chosen` and
    `rejected`, as text or as messages of a chat; `prompt` may be missing where both sides are whole chats, or texts
    without a common prompt. Or they have a `score`, with `prompt` and `completion`, `messages` or `text`.
    """

    model: str = key("", Rule(bool, "give the model to start from"), main="data and models", names="model")
    """The language model to start from, a folder or a name on the hub (owner/model or owner/model@revision)."""
    eval_fraction = key(None, main="data and models")
    """Hold out about this share of the training data where eval is null; null for a tenth. A hash of the prompt
    (without one, of the text) decides, so rows of one prompt stay together."""
    score_field: str = key(SCORE, COLUMN)
    """The column with the rating of a row that is no pair, a number. The model then learns it by least squares, in
    standard deviations from the mean rating."""
    center: bool = True
    """Shift the trained model's score by a constant so that its mean over the reference data is 0. The shift is stored
    in the bias of the last normalisation, so every program that loads the model applies it; a model without that bias
    (Llama) is left as it is, with a warning."""
    reference: str | None = key(None, names="data")
    """The reference data, rows as for ``sft``; null takes the chosen side of the training pairs. A model that learns
    ratings is left as it is by null: its zero is the mean rating."""
    reference_split: str = "train"
    """The split to take where there are several."""
    center_rewards_coefficient: float = key(0.0, ge=0)
    """Weight of (score(chosen) + score(rejected))^2 in the loss, which keeps scores near 0 (Eisenstein et al., arXiv
    2312.09244); 0 for none."""

    @property
    def held_out_share(self) -> float:
        return 0.1 if self.eval_fraction is None else self.eval_fraction

    def check(self) -> None:
        super().check()
        self.require(self.center or self.reference is None, "reference", "must be null without center")
        if self.reference is None:
            self.leaves_out(["reference_split"], "without reference")


@configuration
class RelabelConfig(RewardTokensConfig, RepeatableConfig, OnRanksConfig):
    """Preference pairs labelled anew by a gold reward: ``async-rlhf relabel``. Rows as for ``reward``."""

    data: str = key(REQUIRED, names="data", main="data and models")
    """A .jsonl, .json, .parquet or .csv file, a folder, or a name on the hub."""
    output_dir: str = key(REQUIRED, *FOLDER, role="place", main="output")
    """Where ``<split>.jsonl`` goes for every split; ``data`` of other commands may name this folder."""
    splits: list[str] = key(["train"], Rule(bool, "name at least one"), EACH_ONCE, main="data and models")
    """Splits of the data; a file has one, under the name given here."""
    keep_ties: bool = key(False, main="judging")
    """Keep pairs of equal scores unchanged; false drops them. They are counted either way."""
    batch_size: int = key(32, ge=1)
    """Rows of one pass of the reward model."""
    dtype: Dtype = "float32"
    """Type of the reward model's weights."""

    def check(self) -> None:
        super().check()
        self.check_judge()
        if self.reward_model is None:
            self.leaves_out(("batch_size", "dtype"), "without reward_model")
