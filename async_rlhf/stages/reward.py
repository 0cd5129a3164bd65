"""A reward model from preference pairs: the Bradley-Terry likelihood of the preferred completion.

B  pairs of a batch; their rows alternate: chosen, rejected, chosen, ...
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import ConfigError, RewardConfig
from async_rlhf.data.loading import Rows, load_rows
from async_rlhf.data.tokenizer import encode_prompts, encode_responses
from async_rlhf.evaluation.statistics import wilson
from async_rlhf.forward import reward_scores
from async_rlhf.models import load_tokenizer, new_reward_model
from async_rlhf.rows import by_length, pad_rows
from async_rlhf.stage import Stage
from async_rlhf.stages.training import StageTrainer, publish_model, require_single_process, train

logger = logging.getLogger(__name__)

_COLUMNS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Prompt + completion, as tokens, for both sides."""

    prompt: str
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longer side."""
        return max(len(self.chosen), len(self.rejected))


def run_reward(config: RewardConfig) -> dict[str, float]:
    """Train a reward model and save it with its tokenizer in ``config.output_dir``.

    The score is left as it was trained, without an offset; its mean and deviation are in the results.

    Returns:
        train_loss, pairs, dropped (too long), ties (both sides alike) and, on held-out pairs, eval_pairs, eval_loss,
        eval_accuracy with its 95% interval (Wilson) eval_accuracy_low and eval_accuracy_high, score_mean and score_sd
        over both sides.

    Raises:
        ConfigError: see the message.
    """
    inputs = {"train": config.train, "eval": config.eval, "model": config.model}
    stage = Stage(Path(config.output_dir), "reward", config, inputs, owns_folder=True)
    if (results := stage.done()) is not None:
        return results
    require_single_process("reward")
    rows = load_rows(config.train, config.train_split, columns=_COLUMNS, key="train")
    heldout = load_rows(config.eval, config.eval_split, columns=_COLUMNS, key="eval") if config.eval else None
    tokenizer = load_tokenizer(config.model)
    model = new_reward_model(config.model, tokenizer, config.seed)
    pairs, counts = encode_pairs(rows, tokenizer, config.max_length, "train")
    if heldout is None:
        pairs, held = split_by_prompt(pairs, config.eval_fraction, config.seed)
    else:
        held, _ = encode_pairs(heldout, tokenizer, config.max_length, "eval")

    trainer = RewardTrainer(model, pairs, [pair.longest for pair in pairs], config)
    results = {"train_loss": train(trainer), "pairs": len(pairs), **counts}
    results.update(evaluate_pairs(model, held, config.per_device_train_batch_size))
    logger.info("reward: held-out accuracy %.3f on %d pairs", results["eval_accuracy"], len(held))
    publish_model(stage, trainer, tokenizer, results)
    return results


class RewardTrainer(StageTrainer):
    """-log sigmoid(score(chosen) - score(rejected))."""

    def collate(self, examples: Sequence[EncodedPair]) -> dict[str, Tensor]:
        """input_ids (2B, T), lengths (2B) and labels (B, 2), which only say how many pairs there are."""
        tokens_BT, lengths_B = pair_tensors(examples)
        # The first column is skipped by the Trainer's count for some models and not for others.
        labels_B2 = torch.tensor([[-100, 0]]).repeat(len(examples), 1)
        return {"input_ids": tokens_BT, "lengths": lengths_B, "labels": labels_B2}

    def loss_sum(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """Nats, summed over the pairs."""
        scores_B2 = reward_scores(model, batch["input_ids"], batch["lengths"]).view(-1, 2)
        return -logsigmoid(scores_B2[:, 0] - scores_B2[:, 1]).sum()


def pair_tensors(pairs: Sequence[EncodedPair]) -> tuple[Tensor, Tensor]:
    """Tokens (2B, T), padded on the right, and lengths (2B)."""
    rows = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    return pad_rows(rows, torch.long), torch.tensor([len(row) for row in rows])


def encode_pairs(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, longest: int, key: str
) -> tuple[list[EncodedPair], dict[str, float]]:
    """Pairs as tokens, each side with the end-of-sequence token unless its finish reason is "length".

    Returns:
        The pairs, and how many were left out: `dropped` with a side of more than ``longest`` tokens, `ties` with
        both sides alike.

    Raises:
        ConfigError: a column is not text, or no pair is left.
    """
    for number, row in enumerate(rows, start=1):
        for column in _COLUMNS:
            if not isinstance(row[column], str):
                raise ConfigError(f"{key}: row {number}: `{column}` must be text; got {type(row[column]).__name__}")
    prompts = [str(row["prompt"]) for row in rows]
    encoded = encode_prompts(tokenizer, prompts)
    sides = []
    for side in ("chosen", "rejected"):
        ended = [row.get(f"{side}_finish_reason") != "length" for row in rows]
        texts = [str(row[side]) for row in rows]
        sides.append([a + b for a, b in zip(encoded, encode_responses(tokenizer, texts, ended), strict=True)])
    pairs = [EncodedPair(*pair) for pair in zip(prompts, *sides, strict=True)]
    different = [pair for pair in pairs if pair.chosen != pair.rejected]
    kept = [pair for pair in different if pair.longest <= longest]
    if not kept:
        raise ConfigError(f"max_length: got {longest}; no pair of {key} has two different sides that fit")
    counts = {"dropped": len(different) - len(kept), "ties": len(pairs) - len(different)}
    if len(kept) < len(pairs):
        logger.warning(
            "%s: left out %d pairs longer than %d tokens, %d ties", key, counts["dropped"], longest, counts["ties"]
        )
    return kept, {name: float(count) for name, count in counts.items()}


def split_by_prompt(
    pairs: Sequence[EncodedPair], fraction: float, seed: int
) -> tuple[list[EncodedPair], list[EncodedPair]]:
    """Training and held-out pairs; those of one prompt stay together.

    Raises:
        ConfigError: there is one prompt only.
    """
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    if len(prompts) < 2:
        raise ConfigError(f"train: got pairs of {len(prompts)} prompt; must be of 2 at least, to hold one out")
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    held = {prompts[i] for i in order[:count]}
    return [pair for pair in pairs if pair.prompt not in held], [pair for pair in pairs if pair.prompt in held]


@torch.no_grad()
def evaluate_pairs(model: PreTrainedModel, pairs: Sequence[EncodedPair], batch_size: int) -> dict[str, float]:
    """Loss, accuracy with its interval, and the spread of the scores. Equal scores count as half right."""
    model.eval()
    scores_R2 = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for index_B in by_length(torch.tensor([pair.longest for pair in pairs]), batch_size):
        tokens_BT, lengths_B = pair_tensors([pairs[i] for i in index_B.tolist()])
        scores_B = reward_scores(model, tokens_BT.to(model.device), lengths_B.to(model.device))
        scores_R2[index_B] = scores_B.view(-1, 2).double().cpu()
    margins_R = scores_R2[:, 0] - scores_R2[:, 1]
    accuracy = wilson((margins_R > 0).sum().item() + (margins_R == 0).sum().item() / 2, len(pairs))
    return {
        "eval_pairs": len(pairs),
        "eval_loss": -logsigmoid(margins_R).mean().item(),
        "eval_accuracy": accuracy.estimate,
        "eval_accuracy_low": accuracy.low,
        "eval_accuracy_high": accuracy.high,
        "score_mean": scores_R2.mean().item(),
        "score_sd": scores_R2.std(correction=1).item(),
    }
