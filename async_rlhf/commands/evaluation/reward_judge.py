"""Scores for texts, by a reward model with its own tokenizer or by reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import ConfigError, EvaluateConfig, PairsConfig, RelabelConfig
from async_rlhf.config.common import ChatConfig
from async_rlhf.data.tokenizer import encode_prompts, encode_responses
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.context_length import positions_of
from async_rlhf.models.forward import score_rows
from async_rlhf.models.loading import load_reward_model, load_tokenizer
from async_rlhf.rewards import functions


class RewardJudge:
    """Scores prompts with completions. It reads text, so a reward model need not share the policy's tokenizer.

    Args:
        reward_model: a folder or hub name; None to use functions.
        reward_funcs: names of functions, see :func:`~async_rlhf.rewards.functions.load_reward_functions`; their
            rewards are added, ignoring None.
        batch_size: rows of one pass of the reward model.
        device: of the reward model.
        dtype: of the reward model.
        tokenizer: of the reward model, a folder or hub name; None for the one saved with it.
        trust: whether Python code that comes with these may be run.
        ranks: who share the reward model's passes. Functions are called on rank 0 alone.
        chat: how chats are written.
    """

    def __init__(
        self,
        reward_model: str | None,
        reward_funcs: Sequence[str],
        batch_size: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        tokenizer: str | None = None,
        *,
        trust: bool = False,
        ranks: Ranks | None = None,
        chat: ChatConfig | None = None,
    ) -> None:
        self.batch_size, self.ranks = batch_size, ranks or Ranks()
        self.functions = functions.load_reward_functions(reward_funcs) if self.ranks.is_main else []
        self.model: PreTrainedModel | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        if reward_model is not None:
            self.model = load_reward_model(reward_model, device, trust=trust, dtype=dtype)
            if tokenizer is None:
                self.tokenizer = load_tokenizer(reward_model, key="reward_model", trust=trust)
        if tokenizer is not None:
            self.tokenizer = load_tokenizer(tokenizer, key="reward_tokenizer", trust=trust)
        chat = chat or ChatConfig()
        self.chat = None if self.tokenizer is None else ChatTemplate(self.tokenizer, chat, chat.time_of())

    def to(self, device: torch.device) -> None:
        """Bring the reward model to a device, where it scores from now on."""
        if self.model is not None:
            self.model.to(device)

    @classmethod
    def of(
        cls, config: EvaluateConfig | PairsConfig | RelabelConfig, device: torch.device, ranks: Ranks
    ) -> RewardJudge:
        """The judge that a command's configuration names."""
        return cls(
            config.reward_model,
            config.reward_funcs,
            config.batch_size,
            device,
            torch.float32 if not isinstance(config, RelabelConfig) else getattr(torch, config.dtype),
            None if isinstance(config, PairsConfig) else config.reward_tokenizer,
            trust=config.trust_remote_code,
            ranks=ranks,
            chat=config.chat,
        )

    def __call__(
        self,
        prompts: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        completions: Sequence[str],
        ended: Sequence[bool],
        more: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[float]:
        """One score per completion. Every rank must call it, and gets all of them.

        Args:
            prompts: the prompt of each completion.
            rows: the other columns of its row in the data set, for functions.
            completions: texts without the end-of-sequence token.
            ended: whether each ended by itself; the reward model then sees the token that ends an answer.
            more: what functions get besides, of episodes: "messages" and "metrics".

        Raises:
            ConfigError: a row is longer than the reward model can read.
            RewardError: a score is no finite number, a reward function failed, or all returned None.
        """
        scores: Sequence[float | None] = [None] * len(rows)
        if self.model is not None:
            scores = self._model_scores(prompts, completions, ended)

        def with_functions() -> list[float]:
            columns: dict[str, Any] = {**functions.columns_of(rows), **(more or {})}
            totals = scores
            for function in self.functions:
                name = functions.function_name(function)
                rewards = functions.call_reward_functions({name: function}, prompts, completions, columns)[0][name]
                totals = [a if b is None else (a or 0.0) + b for a, b in zip(totals, rewards, strict=True)]
            return functions.numbers(totals, prompts, completions)

        return self.ranks.broadcast("scores", with_functions)

    def _model_scores(self, prompts: Sequence[str], completions: Sequence[str], ended: Sequence[bool]) -> list[float]:
        assert self.model is not None
        assert self.tokenizer is not None
        assert self.chat is not None
        starts, ends = encode_prompts(self.tokenizer, prompts), encode_responses(self.chat, completions, ended)
        rows = [start + end for start, end in zip(starts, ends, strict=True)]
        limit = positions_of(self.model)
        for number, row in enumerate(rows, start=1):
            if limit is not None and len(row) > limit:
                raise ConfigError(
                    f"reward_model: row {number} of {len(rows)} has {len(row)} tokens with its completion; must have "
                    f"{limit} at most, for the reward model has no more positions: {prompts[number - 1][:80]!r}"
                )
        scores = score_rows(self.model, rows, self.batch_size, Parallel(self.ranks)).tolist()
        for row, score in zip(rows, scores, strict=True):
            if not math.isfinite(score):
                raise functions.RewardError(f"the reward model gave {score} for {self.tokenizer.decode(row)!r}")
        return scores
