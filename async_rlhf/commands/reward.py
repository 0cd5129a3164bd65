"""A reward model from preference pairs: the Bradley-Terry likelihood of the preferred completion.

B  pairs of a batch; their rows alternate: chosen, rejected, chosen, ...
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.commands.reward_scale import calibration, center_scores
from async_rlhf.commands.sft import encode_rows
from async_rlhf.commands.stage import Stage
from async_rlhf.commands.training import StageTrainer, publish_model, require_single_process, train
from async_rlhf.config import ConfigError, RewardConfig
from async_rlhf.data.formats import RowReader
from async_rlhf.data.loading import Rows, load_rows
from async_rlhf.data.token_cache import encode_texts
from async_rlhf.data.tokenizer import encode_responses
from async_rlhf.evaluation.statistics import wilson
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.forward import reward_scores
from async_rlhf.models.loading import load_tokenizer, longest_row, new_reward_model
from async_rlhf.models.rows import by_length, pad_rows
from async_rlhf.reports.integrations import check_integrations

logger = logging.getLogger(__name__)


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


def run_reward(config: RewardConfig) -> dict[str, Any]:
    """Train a reward model and save it with its tokenizer in ``config.output_dir``.

    Returns:
        train_loss, pairs, dropped (too long), ties (both sides alike), score_offset (what ``center`` subtracted) and,
        on held-out pairs, the results of :func:`evaluate_pairs`.

    Raises:
        ConfigError: see the message.
    """
    inputs = {"train": config.train, "eval": config.eval, "model": config.model, "reference": config.reference}
    stage = Stage(Path(config.output_dir), "reward", config, inputs, owns_folder=True)
    if (results := stage.done()) is not None:
        return results
    check_integrations(config.report_to)
    require_single_process("reward")
    rows = load_rows(config.train, config.train_split, key="train")
    heldout = load_rows(config.eval, config.eval_split, key="eval") if config.eval else None
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(config.model, trust=trust)
    model = new_reward_model(config.model, tokenizer, config.seed, trust=trust)
    longest = longest_row(model, config.max_length)
    reference = _reference(config, tokenizer, longest)
    pairs, counts = encode_pairs(rows, tokenizer, longest, "train")
    if heldout is None:
        pairs, held = split_by_prompt(pairs, config.eval_fraction, config.seed)
    else:
        held, _ = encode_pairs(heldout, tokenizer, longest, "eval")

    size = config.per_device_train_batch_size
    if config.lora.rank > 0:
        add_adapters(model, config.lora, config.seed, "SEQ_CLS").score.requires_grad_(True)
    lengths = [pair.longest for pair in pairs]
    trainer = RewardTrainer(model, pairs, lengths, config, lambda: evaluate_pairs(model, held, size))
    found: dict[str, Any] = {"train_loss": train(trainer), "pairs": len(pairs), **counts, "score_offset": 0.0}
    if config.center:
        found["score_offset"] = center_scores(model, reference or [pair.chosen for pair in pairs], 2 * size)
    found |= evaluate_pairs(model, held, size)
    text = "reward: on %d held-out pairs accuracy %.3f, margin %.3f, calibration error %.3f; scores moved by %.3f"
    numbers = (found[key] for key in ("eval_accuracy", "eval_margin", "eval_ece"))
    logger.info(text, len(held), *numbers, -found["score_offset"])
    publish_model(stage, trainer, tokenizer, found)
    return found


def _reference(config: RewardConfig, tokenizer: PreTrainedTokenizerBase, longest: int) -> list[tuple[int, ...]]:
    """The data whose mean score must be 0, as tokens; empty to use the training pairs."""
    if config.reference is None:
        return []
    rows = load_rows(config.reference, config.reference_split, key="reference")
    return [row.tokens for row in encode_rows(rows, tokenizer, False, longest, "reference")[0]]


class RewardTrainer(StageTrainer):
    """Minimises -log sigmoid(score(chosen) - score(rejected)), optionally with a penalty on the sum of the two."""

    config: RewardConfig

    def collate(self, examples: Sequence[EncodedPair]) -> dict[str, Tensor]:
        """input_ids (2B, T), lengths (2B) and labels (B, 2), which only count the pairs."""
        tokens_BT, lengths_B = pair_tensors(examples)
        # The Trainer's count skips the first column for some models and not for others.
        labels_B2 = torch.tensor([[-100, 0]]).repeat(len(examples), 1)
        return {"input_ids": tokens_BT, "lengths": lengths_B, "labels": labels_B2}

    def loss_sum(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss in nats, summed over the pairs."""
        scores_B2 = reward_scores(model, batch["input_ids"], batch["lengths"]).view(-1, 2)
        loss = -logsigmoid(scores_B2[:, 0] - scores_B2[:, 1]).sum()
        return loss + self.config.center_rewards_coefficient * scores_B2.sum(dim=1).square().sum()


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
        ConfigError: a row is not a pair, or no pair is left.
    """
    prompts, *texts_of_sides = zip(*RowReader(tokenizer, key).preferences(rows), strict=True)
    encoded = encode_texts(tokenizer, prompts, key)
    sides = []
    for side, texts in zip(("chosen", "rejected"), texts_of_sides, strict=True):
        ended = [row.get(f"{side}_finish_reason") != "length" for row in rows]
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
        ConfigError: there is only one prompt.
    """
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    if len(prompts) < 2:
        raise ConfigError(f"train: got pairs of {len(prompts)} prompt; must be of 2 at least, to hold one out")
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    held = {prompts[i] for i in order[:count]}
    return [pair for pair in pairs if pair.prompt not in held], [pair for pair in pairs if pair.prompt in held]


@torch.no_grad()
def evaluate_pairs(model: PreTrainedModel, pairs: Sequence[EncodedPair], batch_size: int) -> dict[str, Any]:
    """How well scores order held-out pairs. Equal scores count as half right.

    Returns:
        eval_pairs, eval_loss (nats per pair), eval_accuracy with its 95% interval (Wilson) eval_accuracy_low and
        eval_accuracy_high, eval_margin (mean of chosen less rejected), eval_ece and calibration (see
        :func:`~async_rlhf.commands.reward_scale.calibration`), score_mean and score_sd over both sides.
    """
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
        "eval_margin": margins_R.mean().item(),
        **calibration(margins_R),
        "score_mean": scores_R2.mean().item(),
        "score_sd": scores_R2.std(correction=1).item(),
    }
