"""Scores samples by the reward model and the reward functions, with penalties for length and for not ending."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from async_rlhf.config import ConfigError, GenerationConfig, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.data.rendering import Renderer, conversations
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.distributed.collectives import WHOLE, ContextGroup, Ranks
from async_rlhf.distributed.parallel import ALONE, Parallel
from async_rlhf.models.budget import passes_through
from async_rlhf.models.chats import ChatTemplate
from async_rlhf.models.forward import Row, autocast_dtype, score_batch, score_in_batches
from async_rlhf.models.frozen_models import on_device
from async_rlhf.models.passes import Passes
from async_rlhf.models.rows import in_shares
from async_rlhf.rewards.functions import (
    Called,
    RewardError,
    RewardFunction,
    call_reward_functions,
    columns_of,
    function_name,
    raise_or_warn,
)
from async_rlhf.rewards.prefetch import EarlyResults
from async_rlhf.rewards.sandbox import StoppableFunction, loader_of, warn_unstoppable
from async_rlhf.system.trace import Trace
from async_rlhf.types import Batch, Group, Sample, ScoredBatch


class _Judged(NamedTuple):
    """Rewards of reward functions, and of a reward model that computes outside the learner."""

    by_model_R: Tensor | None
    by_functions: dict[str, list[float | None]]
    """None where a function does not apply, NaN where it failed."""
    seconds: float
    """How long the functions took."""
    causes: Mapping[str, str] = {}
    """What each function that failed did, such as "raised KeyError"."""

    @staticmethod
    def join(parts: Sequence[_Judged]) -> _Judged:
        """The rewards of a batch from those of its parts, which functions alone judged."""
        names = parts[0].by_functions
        rewards = {name: [value for part in parts for value in part.by_functions[name]] for name in names}
        causes = {name: cause for part in parts for name, cause in part.causes.items()}
        return _Judged(None, rewards, sum(part.seconds for part in parts), causes)


class Scorer:
    """The weighted sum of a reward model and of reward functions, less ``length_penalty`` for each token.

    By ``non_eos_penalty``, ``penalty_reward_value`` replaces the score of a completion that did not end by itself, or
    is added to it.

    Args:
        tokenizer: of the policy.
        config: weights, penalties, handling of errors, and sizes.
        reward_model: reads the score at the last real token.
        reward_funcs: see :data:`~async_rlhf.rewards.functions.RewardFunction`.
        prompt_field: the column that holds the prompt's text; it is not passed on as a column.
        parallel: how the ranks share the reward model's work, and possibly its weights.
        context: the ranks that share its rows.
        chat: writes the policy's chats; None for the tokenizer's template.

    Raises:
        ConfigError: there are not as many ``reward_weights`` as functions, or a function's state does not fit a file.
    """

    model_elsewhere = False
    """Whether the reward model computes where the learner does not: in other processes, or on a device of its own."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: OnlineConfig,
        reward_model: PreTrainedModel | None = None,
        reward_funcs: Sequence[RewardFunction] = (),
        prompt_field: str = "query",
        parallel: Parallel = ALONE,
        context: ContextGroup = WHOLE,
        chat: ChatTemplate | None = None,
    ) -> None:
        self._chat = chat or ChatTemplate(tokenizer)
        self._renderer = Renderer(tokenizer, (), self._chat)
        self.parallel, self.ranks, self._context = parallel, parallel.ranks, context
        self.tokenizer, self.config, self.reward_model = tokenizer, config, reward_model
        self._device = None if reward_model is None else parallel.device_of(reward_model)
        self._model_at_hand = on_device(reward_model, config, parallel)
        self.reward_funcs: dict[str, Any] = _by_name(reward_funcs, reward_model is not None)
        self.prompt_field = prompt_field
        self.skip = config.reward_errors == "skip"
        names, weights = list(self.reward_funcs), config.reward_weights or [1.0] * len(reward_funcs)
        rule = f"must be empty, for 1 each, or one number for each of the {len(names)} reward functions {names}"
        require(len(weights) == len(names), "reward_weights", weights, rule)
        self.weights = dict(zip(names, weights, strict=True))
        """Of each reward in the score, by name."""
        by_prompt = all(getattr(function, "by_prompt", False) for function in reward_funcs)
        join = _Judged.join if reward_funcs and by_prompt and not self.model_elsewhere else None
        self._early = EarlyResults(self._judge, join, functions=bool(reward_funcs), seed=config.seed)
        self._processes: dict[str, StoppableFunction] = {}
        """Of the functions that a time limit can stop, unless actors call them."""
        if config.reward_timeout is not None and (config.launch == "local" or config.ray.reward_workers == 0):
            for name, function in self.reward_funcs.items():
                if not isinstance(load := loader_of(function), str):
                    self._processes[name] = StoppableFunction(name, function, load, config.reward_timeout)
        self._callable: dict[str, RewardFunction] = {**self.reward_funcs, **self._processes}
        if reward_model is not None:
            self.weights["model"] = config.reward_model_weight
        try:
            json.dumps(self.state())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"reward_funcs: state_dict() must return what JSON can hold: {error}") from error

    def __call__(self, batch: Batch) -> ScoredBatch:
        """Score every sample. Every rank must call it for the reward model; rank 0 does the rest, and gets the scores.

        Raises:
            RewardError: without ``reward_errors: skip``: a reward is not a finite number, or a function failed.
        """
        here = self.reward_model is not None and not self.model_elsewhere
        by_model_R = self._model_scores(batch.samples, self.ranks) if here else None
        scored = self._score(batch, by_model_R) if self.ranks.is_main else ScoredBatch(batch, torch.zeros(0, 0), {})
        self.ranks.barrier(f"scores of batch {batch.index}")
        return scored

    def _score(self, batch: Batch, by_model_R: Tensor | None) -> ScoredBatch:
        """The scores, given those of a reward model that computes in this process."""
        samples = batch.samples
        judged = self._early.of(batch)
        by_model_R = judged.by_model_R if by_model_R is None else by_model_R
        rewards: dict[str, Tensor] = {}
        failed_R = torch.zeros(len(samples), dtype=torch.bool)
        metrics: dict[str, float] = {}
        failed_episodes_R = torch.tensor([math.isnan(_environment_reward(sample)) for sample in samples])
        why = {"the environment or the agent failed": failed_episodes_R}
        if by_model_R is not None:
            message = "the reward model gave {score} for {text!r}"
            rewards["model"] = self._finite(by_model_R, ~by_model_R.isfinite(), samples, message, with_end=True)
            failed_R = rewards["model"].isnan()
            why["the reward model gave no finite number"] = failed_R
        for name, values in judged.by_functions.items():
            rewards[name] = torch.tensor([torch.nan if v is None else v for v in values], dtype=torch.float64)
            fails_R = rewards[name].isnan() & torch.tensor([value is not None for value in values])
            why[f"reward function {name} {judged.causes.get(name, 'failed')}"] = fails_R
            failed_R = failed_R | fails_R
        if self.reward_funcs:
            metrics["time/reward_funcs"] = judged.seconds
        scores_R = self.total(rewards, failed_R, samples, self.config)
        if self.skip:
            metrics["reward/skipped"] = float(scores_R.isnan().sum())
        metrics |= _metrics(scores_R, rewards, _ended(samples), samples)
        metrics |= _out_of_room(samples, self.config.generation)
        missing = _counted(scores_R.isnan(), why)
        return ScoredBatch(batch, scores_R.view(len(batch.groups), -1), metrics, rewards, missing)

    def total(
        self, rewards: Mapping[str, Tensor], failed_R: Tensor, samples: Sequence[Sample], config: OnlineConfig
    ) -> Tensor:
        """Scores (R,): the weighted sum of rewards with the configuration's penalties, as float32; NaN where a part has
        failed, where no part applies, or where the sum is too large.
        """
        sums_R = -config.length_penalty * torch.tensor(_lengths(samples), dtype=torch.float64)
        sums_R += torch.tensor(list(map(_environment_reward, samples)), dtype=torch.float64)
        nobody_R = torch.tensor([sample.rewards is None for sample in samples])
        for name, rewards_R in rewards.items():
            sums_R += torch.where(rewards_R.isnan(), 0.0, self.weights[name] * rewards_R)
            nobody_R &= rewards_R.isnan()
        scores_R = sums_R.float().masked_fill(failed_R, torch.nan)
        message = "every reward function returned None for completion {text!r}; at least one must return a number"
        scores_R = self._finite(scores_R, nobody_R & ~failed_R, samples, message)
        message = "the reward of completion {text!r} is {score}; must be a finite float32"
        scores_R = self._finite(scores_R, ~scores_R.isfinite() & ~failed_R & ~nobody_R, samples, message)
        if config.non_eos_penalty:
            base_R = scores_R if config.non_eos_penalty == "add" else torch.zeros_like(scores_R)
            scores_R = torch.where(_ended(samples), scores_R, base_R + config.penalty_reward_value)
        return scores_R

    def begin(self, index: int, first: int, groups: Sequence[Group], prompts: int | None = None) -> None:
        """Judge a part of a batch beside training, unless a function keeps a state: it sees batches in their turn.

        May be called from any thread of rank 0.

        Args:
            index: the batch; minus the version, of held-out answers.
            first: the number of the first prompt in it.
            groups: that prompt and those after it, as they were sampled.
            prompts: how many a batch of held-out answers has; None for training.
        """
        if not self.state():
            self._early.begin(index, first, groups, self.config.batch_size if prompts is None else prompts)

    def _judge(self, groups: Sequence[Group]) -> _Judged:
        """What reward functions say, and a reward model that computes elsewhere."""
        samples = [sample for group in groups for sample in group.samples]
        elsewhere = self.reward_model is not None and self.model_elsewhere
        by_model_R = self._model_scores(samples, ALONE.ranks) if elsewhere else None
        started = time.monotonic()
        if not self.reward_funcs:
            return _Judged(by_model_R, {}, 0.0)
        self._prepare()
        prompts = [group.prompt for group in groups for _ in group.samples]
        columns = columns_of([prompt.columns for prompt in prompts], self.prompt_field)
        columns |= conversations(self._renderer, prompts, samples)
        if self.config.generation.max_turns is not None:
            columns["metrics"] = [dict(sample.metrics) for sample in samples]
        texts = [str(prompt.columns[self.prompt_field]) for prompt in prompts]
        completions, each = decode_samples(self.tokenizer, samples), len(groups[0].samples)
        by_functions, causes = self._call_functions(texts, completions, columns, each)
        return _Judged(by_model_R, by_functions, time.monotonic() - started, causes)

    @contextmanager
    def started(self, trace: Trace | None = None) -> Iterator[None]:
        """Within, scoring can run: rank 0 has the processes of functions that a time limit can stop. The trace gets
        spans of rewards that are computed beside training.
        """
        if not self.ranks.is_main:
            yield
            return
        if self.config.reward_timeout is not None:
            for name, function in self.reward_funcs.items():
                if isinstance(why := loader_of(function), str):
                    warn_unstoppable(name, why)
        try:
            self._prepare()
            with self._early.running(trace):
                yield
        finally:
            for process in self._processes.values():
                process.close()

    def _prepare(self) -> None:
        """Start all processes that are not running, at the same time."""
        for process in self._processes.values():
            process.start()
        for process in self._processes.values():
            process.wait()

    def state(self) -> dict[str, Any]:
        """The states of reward functions with ``state_dict()`` and ``load_state_dict()``, for checkpoints, as JSON."""
        # Not the reward model: its weights are not JSON and do not change.
        return {
            name: function.state_dict()
            for name, function in self.reward_funcs.items()
            if hasattr(function, "load_state_dict") and not isinstance(function, nn.Module)
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        for name in state.keys() & self.reward_funcs.keys():
            self.reward_funcs[name].load_state_dict(state[name])

    def _model_scores(self, samples: Sequence[Sample], ranks: Ranks) -> Tensor:
        """float64, as the model gave them, on every one of these ranks; the first has the samples."""
        rows = ranks.broadcast("rows to score", lambda: list(map(self._read_by_model, samples)))
        return score_in_batches(self.score_batches, rows, self._passes, self.scoring_ranks).double()

    def _read_by_model(self, sample: Sample) -> np.ndarray:
        """Tokens of the last conversation; one that ended always ends with the same token for the reward model."""
        tokens = sample.tokens[max(sample.starts, default=0) :]
        if sample.finish_reason == "stop" and tokens[-1] != self._chat.end:
            tokens = np.append(tokens[:-1], np.int32(self._chat.end))
        return tokens

    @cached_property
    def _passes(self) -> Passes:
        """The limits of a pass through the reward model."""
        assert self.reward_model is not None
        assert self._device is not None
        return passes_through([self.reward_model], self.config.annotation_limits, self._device)

    @property
    def scoring_ranks(self) -> int:
        """How many batches the ranks compute at a time."""
        return self.ranks.count // self._context.size

    def score_batches(self, batches: list[list[Row]]) -> list[Tensor]:
        """Scores of each batch of rows by the reward model, on every rank; each computes some of them."""
        assert self.reward_model is not None
        dtype, context = autocast_dtype(self.config), self._context
        score = partial(score_batch, self.reward_model, autocast=dtype, device=self._device, context=context)
        with self._model_at_hand:
            return in_shares("rewards", batches, score, self.parallel, context.size)

    def _call_functions(
        self, prompts: list[str], completions: Sequence[str], columns: Mapping[str, list[Any]], samples: int
    ) -> Called:
        """The rewards of every function, and what each did that has failed; each prompt has ``samples`` consecutive
        completions.
        """
        options = self.config.reward_timeout, self.skip, self.config.reward_retries
        return call_reward_functions(self._callable, prompts, completions, columns, *options)

    def _finite(
        self, scores_R: Tensor, broken_R: Tensor, samples: Sequence[Sample], message: str, with_end: bool = False
    ) -> Tensor:
        """Replace broken scores by NaN, or raise if they stop the run; the error shows a text as functions get it, or
        with its end, as a reward model does.
        """
        if not broken_R.any():
            return scores_R
        first = int(broken_R.nonzero()[0])
        (text,) = decode_samples(self.tokenizer, [samples[first]])
        text = self.tokenizer.decode(samples[first].drawn.tolist()) if with_end else text
        error = RewardError(message.format(score=scores_R[first].item(), text=text))
        raise_or_warn(error, int(broken_R.sum()), len(samples), self.skip)
        return scores_R.masked_fill(broken_R, torch.nan)


class ApartScorer(Scorer):
    """A :class:`Scorer` on rank 0 whose reward model computes on ``reward_model_device``, in the
    thread that judges batches before their turn, with the passes of a learner on one rank.
    """

    model_elsewhere = True
    scoring_ranks = 1

    def score_batches(self, batches: list[list[Row]]) -> list[Tensor]:
        """Scores of each batch of rows by the reward model."""
        assert self.reward_model is not None
        device, dtype = self.reward_model.device, autocast_dtype(self.config)
        # Kernels of libraries run on the current device, and each thread has its own.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return [score_batch(self.reward_model, batch, dtype, device) for batch in batches]


def metric_names(reward_funcs: Sequence[RewardFunction], with_model: bool) -> list[str]:
    """Names of the metrics of an evaluation's scored answers."""
    names = [*(["model"] if with_model else []), *_by_name(reward_funcs, with_model)]
    return ["objective/scores", "objective/scores_std", *(f"reward/{name}" for name in names), *_ABOUT_LENGTH]


_ABOUT_LENGTH = ("val/num_eos_tokens", "val/ended_share", "val/response_length")


def _by_name(functions: Sequence[RewardFunction], with_model: bool) -> dict[str, RewardFunction]:
    """Functions of the same name become f, f_2, f_3, and so does one with the name of something else."""
    named, taken = dict[str, RewardFunction](), {"skipped", *(["model"] if with_model else [])}
    for function in functions:
        first = name = function_name(function)
        number = 2
        while name in named or name in taken:
            name, number = f"{first}_{number}", number + 1
        named[name] = function
    return named


def _counted(missing_R: Tensor, why: Mapping[str, Tensor]) -> dict[str, int]:
    """How many missing scores each cause explains; of several causes of a score the first counts."""
    counts, left_R = {}, missing_R
    for cause, failed_R in {**why, "no reward applies, or their sum is too large": missing_R}.items():
        counts[cause] = int((left_R & failed_R).sum())
        left_R = left_R & ~failed_R
    return {cause: count for cause, count in counts.items() if count}


def _metrics(
    scores_R: Tensor, rewards: Mapping[str, Tensor], ended_R: Tensor, samples: Sequence[Sample]
) -> dict[str, float]:
    """Scores and rewards are averaged over the valid ones; without any, the mean is left out."""
    scores_R = scores_R.double()  # in float32 the square of a large score is infinite
    mean = scores_R.nanmean()
    means = {"objective/scores": mean, "objective/scores_std": (scores_R - mean).square().nanmean().sqrt()}
    means |= {f"reward/{name}": rewards_R.nanmean() for name, rewards_R in rewards.items()}
    lengths = _lengths(samples)
    return {
        **_of_episodes(samples),
        **{name: value.item() for name, value in means.items() if value.isfinite()},
        "val/num_eos_tokens": float(ended_R.sum()),
        "val/ended_share": ended_R.float().mean().item(),
        "val/response_length": sum(lengths) / len(lengths),
    }


def _of_episodes(samples: Sequence[Sample]) -> dict[str, float]:
    """Means of the metrics of episodes, each over the episodes that have it, and left out where none has; empty for
    plain completions."""
    if all(sample.messages is None for sample in samples):
        return {}
    names = dict.fromkeys(name for sample in samples for name in sample.metrics)
    metrics = {name: [sample.metrics[name] for sample in samples if name in sample.metrics] for name in names}
    metrics["observed_tokens"] = [float((~sample.sampled[sample.sampled.argmax() :]).sum()) for sample in samples]
    metrics["reward"] = [_environment_reward(sample) for sample in samples]
    failed = sum(metrics.pop("failed", ()))
    known = {name: [value for value in each if not math.isnan(value)] for name, each in metrics.items()}
    return {
        "episode/failed": failed,
        **{f"episode/{name}": float(np.mean(each)) for name, each in known.items() if each},
    }


def _out_of_room(samples: Sequence[Sample], limits: GenerationConfig) -> dict[str, float]:
    """Shares of episodes that were cut off although their last answer ended: before another turn, for want of tokens,
    or after the last turn. A last answer that was cut off early counts among the former.
    """
    if limits.max_turns is None:
        return {}
    cut = [sample for sample in samples if sample.finish_reason == "length" and "failed" not in sample.metrics]
    turns = sum(sample.metrics.get("turns", 0.0) >= limits.max_turns for sample in cut)
    short = [sample for sample in cut if sample.metrics.get("turns", 0.0) < limits.max_turns]
    room = sum(_last_answer(sample) < limits.response_length for sample in short)
    return {"episode/out_of_room": room / len(samples), "episode/out_of_turns": turns / len(samples)}


def _last_answer(sample: Sample) -> int:
    """How many tokens the policy drew last in a row."""
    return int((~sample.sampled[::-1]).argmax()) if sample.sampled[-1] else 0


def _ended(samples: Sequence[Sample]) -> Tensor:
    """Whether each sample ended by itself: (R,)."""
    return torch.tensor([sample.finish_reason == "stop" for sample in samples])


def _environment_reward(sample: Sample) -> float:
    """The total reward from an environment."""
    return 0.0 if sample.rewards is None else float(sample.rewards.sum(dtype=np.float64))


def _lengths(samples: Sequence[Sample]) -> list[int]:
    """How many tokens of each sample the policy drew."""
    return [int(np.count_nonzero(sample.sampled)) for sample in samples]
