"""Supervised fine-tuning on the response tokens, including the end of sequence."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.algorithms.supervised import SFT
from async_rlhf.commands.evaluation.likelihood import EncodedRow, loss_and_perplexity
from async_rlhf.commands.stage import Stage
from async_rlhf.commands.stage_loop import Task, weighted_rows
from async_rlhf.commands.training import run_stage
from async_rlhf.config import ConfigError, NewModelConfig, SFTConfig
from async_rlhf.config.base import require
from async_rlhf.config.common import ChatConfig
from async_rlhf.config.stages import StageConfig
from async_rlhf.data.formats import RowReader, first_words
from async_rlhf.data.held_out import hold_out
from async_rlhf.data.loading import Rows, load_rows
from async_rlhf.data.ratings import best_rows
from async_rlhf.data.templates import read_template, template_file, use_template
from async_rlhf.data.tokenizer import Part, begun, encode_parts, text_start, train_tokenizer
from async_rlhf.data.views import Examples
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.models.adapters import add_adapters
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import longest_row
from async_rlhf.models.gpu_defaults import bare_model
from async_rlhf.models.loading import load_policy, load_tokenizer
from async_rlhf.models.new import embed_added_tokens, new_language_model
from async_rlhf.types import Experience

logger = logging.getLogger(__name__)


def run_sft(config: SFTConfig) -> dict[str, float]:
    """Train a language model on texts, and save it with its tokenizer in ``config.output_dir``.

    Returns:
        train_loss (nats per trained token, mean over the run), rows, dropped (too long, or no longer than
        ``prompt_words``) and, with held-out data, eval_loss (nats per token) and eval_perplexity (e to that power).

    Raises:
        ConfigError: see the message; among others a row whose `query` is not the start of its text.
    """
    inputs = {"train": config.train, "eval": config.eval, "model": config.model, "tokenizer": config.tokenizer}
    if config.chat_template is not None and template_file(config.chat_template) is not None:
        inputs["chat_template"] = config.chat_template
    stage = Stage(Path(config.output_dir), "sft", config, inputs, owns_folder=True)
    return run_stage(stage, partial(_read, config))


def _read(config: SFTConfig, loaded: PreTrainedModel | None, now: datetime) -> Task:
    rows, heldout = load_stage_rows(config)
    if config.min_score is not None or config.best_of_prompt:
        count, rows = len(rows), best_rows(rows, config.min_score, config.best_of_prompt, "train")
        logger.info("train: %d of %d rows by their scores", len(rows), count)
    rows, heldout, short = divided(config, rows, heldout)
    model, tokenizer = _start(config, rows, loaded)
    longest = longest_row(model, config.max_length)
    chat = ChatTemplate(tokenizer, config.chat, now)
    encode = partial(encode_rows, completion_only=config.completion_only, longest=longest, last=config.learn == "last")
    examples, dropped = encode(rows, chat, key="train")
    held: Sequence[EncodedRow] = []
    if heldout is not None:
        held = encode(heldout, chat, key="eval")[0]
    if config.lora.rank > 0 and loaded is None:
        add_adapters(model, config.lora, config.seed)

    def evaluate(parallel: Parallel) -> dict[str, float]:
        if not held:
            return {}
        loss, perplexity = loss_and_perplexity(model, held, config.per_device_train_batch_size, parallel)
        return {"eval_loss": loss, "eval_perplexity": perplexity}

    return Task(
        model,
        tokenizer,
        SFT,
        examples,
        rows=demonstration_rows,
        counts={"rows": len(examples), "dropped": dropped + short},
        evaluate=evaluate,
        summary="held-out loss {eval_loss:.4f}, perplexity {eval_perplexity:.2f}".format_map,
    )


def demonstration_rows(examples: Sequence[EncodedRow]) -> Experience:
    """Rows that weigh as many response tokens as they have."""
    return weighted_rows(examples, [row.targets for row in examples])


def load_stage_rows(config: StageConfig, numbers: Sequence[str] = ()) -> tuple[Rows, Rows | None]:
    """Training rows, and those of a file of held-out rows, if there is one; ``numbers`` are columns of numbers."""
    rows = load_rows(config.train, config.train_split, numbers=numbers, key="train")
    return rows, load_rows(config.eval, config.eval_split, numbers=numbers, key="eval") if config.eval else None


def divided(config: StageConfig, rows: Rows, heldout: Rows | None) -> tuple[Rows, Rows | None, int]:
    """Training rows, held-out rows if there are any, and how many training texts ``prompt_words`` left out.

    Raises:
        ConfigError: they cannot be divided.
    """
    count = len(rows)
    if config.prompt_words is not None:
        rows = first_words(rows, config.prompt_words, "train")
        heldout = None if heldout is None else first_words(heldout, config.prompt_words, "eval")
    short = count - len(rows)
    if heldout is None and config.held_out_share is not None:
        rows, heldout = hold_out(rows, config.held_out_share, "train")
    return rows, heldout, short


def encode_rows(
    rows: Rows,
    chat: ChatTemplate,
    completion_only: bool,
    longest: int,
    key: str,
    rated: bool = False,
    last: bool = True,
) -> tuple[Examples[EncodedRow], int]:
    """Rows as tokens, made when they are asked for, and how many were dropped for having more than ``longest``.

    Args:
        rows: see :meth:`~async_rlhf.data.formats.RowReader.demonstrations`.
        chat: writes chats, and says which token ends an answer.
        completion_only: only responses are trained on; of a chat, with ``last``, only the last one.
        longest: most tokens of a row.
        key: the configuration key that errors name.
        rated: rows are rated and not learnt: what they say of learning does not count, and one may have a single token.
        last: see ``completion_only``.

    Raises:
        ConfigError: a row is not a demonstration, or has no prompt to leave out, or every row is too long.
    """
    tokenizer = chat.tokenizer
    reader, start, least = RowReader(tokenizer, key, chat=chat), text_start(tokenizer), 1 if rated else 2

    def read(row: Mapping[str, Any], number: int) -> Part:
        prompt, response, learnt, end, ended = reader.turns(row, number, last, not completion_only, rated)
        prompt = prompt if isinstance(prompt, tuple) else begun(start, prompt)
        return Part((prompt, response, learnt), (prompt == "", ended, end))

    (prompts, responses, marks), (is_bare, has_end, end_ids), _ = encode_parts(tokenizer, rows, read, key)
    bare = np.flatnonzero(is_bare)
    if completion_only and len(bare) > 0:
        raise ConfigError(
            f"completion_only: got True, and row {bare[0] + 1} of {key} has no prompt (`query`, or `prompt` "
            "with `completion`, or `messages`); set completion_only false to train on whole texts, or prompt_words"
        )
    ended, ends = has_end.astype(np.int8), end_ids.astype(np.int32)
    if completion_only and (several := int(np.count_nonzero(marks.lengths()))):
        logger.info("%s: %d of %d chats have several answers; all of them are trained on", key, several, len(ended))
    lengths = prompts.lengths() + responses.lengths() + ended

    def example(number: int) -> EncodedRow:
        prompt, end, learnt = prompts[number], (int(ends[number]),) * int(ended[number]), marks[number]
        learnt = learnt + (1,) * len(end) if learnt and completion_only else ()
        return EncodedRow(prompt + responses[number] + end, len(prompt) if completion_only else 0, learnt)

    kept = Examples.of(example, lengths, (lengths >= least) & (lengths <= longest))
    dropped = len(lengths) - len(kept)
    if not kept:
        problem = f"no row of {key} has {least} to {longest} tokens (the shortest has {lengths.min()})"
        raise ConfigError(f"max_length: got {longest}; {problem}")
    if dropped:
        logger.warning("%s: dropped %d of %d rows: not %d to %d tokens", key, dropped, len(lengths), least, longest)
    return kept, dropped


def _start(
    config: SFTConfig, rows: Rows, loaded: PreTrainedModel | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train, which may be loaded, and its tokenizer, with the chat template if there is one."""
    template = None if config.chat_template is None else read_template(config.chat_template)
    trust = config.trust_remote_code
    if config.model is not None:
        tokenizer = load_tokenizer(config.model, trust=trust)
        added = [] if template is None else use_template(tokenizer, template)
        rule = f"must be 0 where chat_template adds tokens ({', '.join(added)}): adapters do not train embeddings"
        require(not added or config.lora.rank == 0, "lora.rank", config.lora.rank, rule)
        if config.lora.target_modules and (bare := bare_model(config.model, trust)) is not None:
            add_adapters(bare, config.lora, config.seed)  # an error before the weights are loaded
        if loaded is not None:
            return loaded, tokenizer
        model = load_policy(config.model, trust=trust)
        return (embed_added_tokens(model, tokenizer, config.seed) if added else model), tokenizer
    size = config.new_model
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer, "tokenizer", trust=trust)
        tokenizer.model_max_length = size.max_positions
        if template is not None:
            use_template(tokenizer, template)
    else:
        tokenizer = _trained_tokenizer(size, rows, template, config.chat)
    return loaded or new_language_model(size, tokenizer, config.seed), tokenizer


def _trained_tokenizer(
    size: NewModelConfig, rows: Rows, template: str | None, chat: ChatConfig
) -> PreTrainedTokenizerBase:
    """A tokenizer that is trained on the rows, written by the template if they are chats."""
    blank = train_tokenizer([], 300, size.max_positions)  # bytes alone: it writes chats as the trained one will
    special = [] if template is None else use_template(blank, template)
    reader = RowReader(blank, "train", chat=ChatTemplate(blank, chat))
    texts = (prompt + response for prompt, response in reader.demonstrations(rows))
    tokenizer = train_tokenizer(texts, size.vocab_size, size.max_positions, special)
    if template is not None:
        use_template(tokenizer, template)
    return tokenizer
