"""Supervised fine-tuning on the response tokens, the end of sequence among them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import ConfigError, SFTConfig
from async_rlhf.data.loading import Rows, load_rows
from async_rlhf.data.tokenizer import TEXT, encode_prompts, encode_responses, split_text, train_tokenizer
from async_rlhf.evaluation.likelihood import EncodedRow, loss_and_perplexity, row_tensors
from async_rlhf.forward import response_logits
from async_rlhf.models import load_policy, load_tokenizer, new_gpt_neox
from async_rlhf.stage import Stage
from async_rlhf.stages.training import StageTrainer, publish_model, require_single_process, train

logger = logging.getLogger(__name__)


def run_sft(config: SFTConfig) -> dict[str, float]:
    """Train a language model on texts, and save it with its tokenizer in ``config.output_dir``.

    Returns:
        train_loss (nats per trained token, mean over the run), rows, dropped (too long) and, with ``eval``, eval_loss
        (nats per token) and eval_perplexity (e to that power).

    Raises:
        ConfigError: see the message; among others a row whose ``query`` is not the start of its text.
    """
    inputs = {"train": config.train, "eval": config.eval, "model": config.model}
    stage = Stage(Path(config.output_dir), "sft", config, inputs, owns_folder=True)
    if (results := stage.done()) is not None:
        return results
    require_single_process("sft")
    columns = ["query", TEXT] if config.completion_only else [TEXT]
    rows = load_rows(config.train, config.train_split, columns=columns, key="train")
    heldout = load_rows(config.eval, config.eval_split, columns=columns, key="eval") if config.eval else None
    model, tokenizer = _start(config, rows)
    longest = _longest(config, model)
    examples, dropped = encode_rows(rows, tokenizer, config.completion_only, longest, "train")
    held_examples = encode_rows(heldout, tokenizer, config.completion_only, longest, "eval")[0] if heldout else []

    trainer = SFTTrainer(model, examples, [len(row.tokens) for row in examples], config)
    results = {"train_loss": train(trainer), "rows": len(examples), "dropped": dropped}
    if held_examples:
        size = config.per_device_train_batch_size
        results["eval_loss"], results["eval_perplexity"] = loss_and_perplexity(model, held_examples, size)
        logger.info("sft: held-out loss %.4f, perplexity %.2f", results["eval_loss"], results["eval_perplexity"])
    publish_model(stage, trainer, tokenizer, results)
    return results


class SFTTrainer(StageTrainer):
    """Cross-entropy of the response tokens. The head computes no logits elsewhere."""

    def collate(self, examples: Sequence[EncodedRow]) -> dict[str, Tensor]:
        """input_ids (B, T), and labels (B, T) that are -100 outside the response."""
        tokens_BT, mask_BT = row_tensors(examples)
        return {"input_ids": tokens_BT, "labels": tokens_BT.masked_fill(~mask_BT, -100)}

    def loss_sum(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """Nats, summed over the response tokens."""
        mask_BT = batch["labels"] != -100
        logits_NV = response_logits(model, batch["input_ids"], mask_BT)
        return torch.nn.functional.cross_entropy(logits_NV, batch["labels"][mask_BT], reduction="sum")


def encode_rows(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, completion_only: bool, longest: int, key: str
) -> tuple[list[EncodedRow], int]:
    """Rows as tokens, and how many were dropped for having more than ``longest``.

    Args:
        rows: with `query_reference_response`, and maybe `query`, its start.
        tokenizer: its end-of-sequence token is added to every row.
        completion_only: only what follows the query is trained on.
        longest: most tokens of a row.
        key: the configuration key that errors name.

    Raises:
        ConfigError: a query is not the start of its text, or every row is too long.
    """
    queries, rests = [], []
    for number, row in enumerate(rows, start=1):
        query, rest = split_text(row, f"{key}: row {number}")
        queries.append(query)
        rests.append(rest)
    encoded = zip(encode_prompts(tokenizer, queries), encode_responses(tokenizer, rests), strict=True)
    examples = [EncodedRow(query + rest, len(query) if completion_only else 0) for query, rest in encoded]
    kept = [row for row in examples if 1 < len(row.tokens) <= longest]
    dropped = len(examples) - len(kept)
    if not kept:
        shortest = min(len(row.tokens) for row in examples)
        raise ConfigError(f"max_length: got {longest}; every row of {key} is longer (the shortest has {shortest})")
    if dropped:
        logger.warning("%s: dropped %d of %d rows: not 2 to %d tokens", key, dropped, len(examples), longest)
    return kept, dropped


def _start(config: SFTConfig, rows: Rows) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if config.model is not None:
        return load_policy(config.model), load_tokenizer(config.model)
    size = config.new_model
    tokenizer = train_tokenizer((str(row[TEXT]) for row in rows), size.vocab_size, size.max_positions)
    return new_gpt_neox(size, tokenizer, config.seed), tokenizer


def _longest(config: SFTConfig, model: PreTrainedModel) -> int:
    """max_length, but no more than the model has positions for."""
    return min(config.max_length, getattr(model.config, "max_position_embeddings", None) or config.max_length)
