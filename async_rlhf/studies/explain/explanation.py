"""Puts together what is known of an update: its step, completions, tokens, parts of the reward, and lag."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.rollouts import sample_numbers
from async_rlhf.studies.explain.ablation import Effect, Removal, distance, reward_parts, without_part
from async_rlhf.studies.explain.contributions import Contributions, contributions
from async_rlhf.studies.explain.update import RepeatableUpdate, inner, norm
from async_rlhf.types import Experience, Group, Sample, ScoredBatch

logger = logging.getLogger(__name__)

TOKENS = 20
"""How many the lists of the most influential tokens have."""


def explained(
    update: RepeatableUpdate,
    scored: ScoredBatch,
    experience: Experience,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    after: Sequence[Tensor],
    top: int,
) -> dict[str, Any]:
    """What moved the policy in an update, as JSON can hold it.

    Args:
        update: that can be repeated.
        scored: its batch.
        experience: what the learner made of it.
        scorer: that scored it.
        tokenizer: of the policy.
        after: the policy's weights after the update.
        top: how many units are left out in turn, those with the largest contributions.
    """
    step = update.step_to(after)
    measured = contributions(update, experience, step)
    account = Account(update, experience, after, step, scored, measured, tokenizer)
    likely = account.by_contribution[:top]
    for unit in likely:
        account.effects[unit] = account.without_units([unit])
        logger.info("explain: left out %d of %d", len(account.effects), len(likely))
    units = [account.unit(rank, unit) for rank, unit in enumerate(account.order, start=1)]
    parts = [
        {"part": part, "without": account.with_scores(without_part(scorer, scored, part)).row}
        for part in reward_parts(scorer, scored)
    ]
    return {
        "step": account.of_step(),
        "completions": units,
        "tokens": account.tokens(),
        "vocabulary": account.vocabulary(),
        "not_trained_on": len(scored.batch.samples) - len(experience),
        "reward_parts": parts,
        "lag": account.lag(),
    }


def implied_shares(beta: float, steps: int) -> list[float]:
    """What momentum alone makes of the share of earlier batches, long after the start of a run: where gradients have
    nothing in common, and where all are the same.

    With coefficients 1 - beta^k of this update's k-th last gradient in the sum of its steps, and beta (1 - beta^n)
    beta^k of the k-th gradient before them: of the squares, and of the sums.

    Args:
        beta: of the optimiser's first moment.
        steps: n, of the update.
    """
    coefficients = [1 - beta**k for k in range(1, steps + 1)]
    apart = sum(part**2 for part in coefficients)
    earlier = beta**2 * (1 - beta**steps) ** 2 / (1 - beta**2)
    return [earlier / (earlier + apart), 1 - sum(coefficients) / steps]


class _Row(NamedTuple):
    """A row of an experience, where it comes from."""

    number: int
    """Among all samples of the batch."""
    group: Group
    position: int
    """Among the prompt's samples."""
    sample: Sample


@dataclass(frozen=True)
class Account(Removal):
    """An update, and what its parts were and did."""

    scored: ScoredBatch
    measured: Contributions
    tokenizer: PreTrainedTokenizerBase
    effects: dict[int, Effect] = field(default_factory=dict)
    """Of the units that were left out; all of them before anything is asked of the order."""

    def of_step(self) -> dict[str, Any]:
        """How large the step is, how far it moves the policy, and what of it earlier batches have left."""
        update, measured = self.update, self.measured
        config, size = update.learner.config, norm(self.step)
        past, anew = update.take_without_gradient(measured.steps), update.take_without_momentum(self.experience)
        tokens_U = measured.tokens_BT.sum(dim=1).view(-1, self.experience.rows_per_unit).sum(dim=1)
        differ = (tokens_U - measured.units_U).abs().sum().item()
        return {
            "optimizer_steps": measured.steps,
            "epochs": config.num_epochs,
            "mini_batches": config.num_mini_batches,
            "rows_per_unit": self.experience.rows_per_unit,
            "of": "policy, without the value model" if update.learner.needs.values else "policy",
            "parameters": sum(tensor.numel() for tensor in self.step),
            "norm": size,
            "relative_norm": size / (norm(update.before) or 1.0),
            "kl_per_token": distance(update, self.experience, self.after, update.before).kl,
            "gradient_kept": measured.kept,
            "contributions": {
                "sum_of_units": measured.units_U.sum().item(),
                "of_the_whole_batch": measured.total,
                "sum_of_sizes": self.whole,
                "tokens_differ_by": differ / self.whole if self.whole else 0.0,
            },
            "without_gradient": None
            if size == 0
            else {
                **self.effect(past).row,
                "share": 1 - inner(update.step_to(anew), self.step) / size**2,
                "implied": implied_shares(config.adam_beta1, measured.steps) if "adamw" in config.optimizer else None,
            },
            "more_likely_by": self._moved(),
        }

    def _moved(self) -> dict[str, float]:
        """By how many nats the step makes completions more likely, to first order: means over those trained on."""
        experience, moves_B = self.experience, self.measured.moves_BT.sum(dim=1)
        seen_B = (self.measured.seen_U & (experience.loss_weights_U > 0)).repeat_interleave(experience.rows_per_unit)
        if experience.rows_per_unit == 2:
            first_B = torch.arange(len(experience)) % 2 == 0
            kinds = {"chosen": first_B, "rejected": ~first_B}
        elif experience.advantages_BT is None:
            kinds = {"trained on": torch.ones_like(seen_B)}
        else:
            sums_B = experience.advantages_BT.sum(dim=1)
            kinds = {"with a positive advantage": sums_B > 0, "with a negative advantage": sums_B < 0}
        chosen = {name: moves_B[kind_B & seen_B] for name, kind_B in kinds.items()}
        return {name: moves_N.mean().item() for name, moves_N in chosen.items() if len(moves_N)}

    @cached_property
    def rows(self) -> list[_Row]:
        """Which sample each row is."""
        each = [(group, n) for group in self.scored.batch.groups for n in range(len(group.samples))]
        numbers = sample_numbers(self.experience, self.scored)
        return [_Row(number, *each[number], each[number][0].samples[each[number][1]]) for number in numbers]

    @cached_property
    def whole(self) -> float:
        """The sizes of all units' contributions together."""
        return self.measured.units_U.abs().sum().item()

    @cached_property
    def by_contribution(self) -> list[int]:
        """Units, those with the largest contributions first."""
        return self.measured.units_U.abs().argsort(descending=True, stable=True).tolist()

    @cached_property
    def order(self) -> list[int]:
        """Units: those that were left out by the change that this made, equal ones as in the batch; then the others."""
        size = self.experience.rows_per_unit
        rest = [unit for unit in self.by_contribution if unit not in self.effects]
        return sorted(self.effects, key=lambda unit: (-self.change(unit), self.rows[unit * size].number)) + rest

    def change(self, unit: int) -> float:
        """That leaving a unit out has made, to a millionth of the step: beyond, rounding decides."""
        return round(self.effects[unit].change or 0.0, 6)

    @cached_property
    def _seen(self) -> Tensor:
        """Whether each token was sampled and is one of a unit that a step was taken on."""
        seen_B = self.measured.seen_U.repeat_interleave(self.experience.rows_per_unit)
        return (self.experience.sampled_BT > 0) & seen_B[:, None]

    def percent(self, contribution: float) -> float:
        """Of the sizes of all units' contributions together."""
        return 100 * contribution / self.whole if self.whole else 0.0

    def unit(self, rank: int, unit: int) -> dict[str, Any]:
        """One completion, or pair."""
        effect = self.effects.get(unit)
        size, contribution = self.experience.rows_per_unit, self.measured.units_U[unit].item()
        rows = range(unit * size, (unit + 1) * size)
        roles = ("chosen", "rejected") if size == 2 else ("completion",) * size
        prompt = self.rows[rows[0]].group.prompt
        changes = [None] * size if effect is None else effect.distance.logprobs_B[rows.start : rows.stop].tolist()
        return {
            "rank": rank,
            "tied": effect is not None and [*map(self.change, self.effects)].count(self.change(unit)) > 1,
            "contribution": contribution,
            "percent": self.percent(contribution),
            "weight": self.experience.loss_weights_U[unit].item(),
            "draw": prompt.draw,
            "row": prompt.row,
            "prompt": self.tokenizer.decode(prompt.tokens),
            "rows": [
                {"role": role, **self._row(b, with_tokens=effect is not None), "more_likely_by": change}
                for b, role, change in zip(rows, roles, changes, strict=True)
            ],
            "objective": {name: number(x_U[unit].item()) for name, x_U in self.measured.metrics.items()},
            "without": None if effect is None else effect.row,
        }

    def _row(self, b: int, with_tokens: bool) -> dict[str, Any]:
        row = self.rows[b]
        rewards = {name: number(values_R[row.number].item()) for name, values_R in self.scored.rewards.items()}
        advantages_BT, sampled_T = self.experience.advantages_BT, self.experience.sampled_BT[b] > 0
        entry = {
            "number": row.number + 1,
            "sample": row.position,
            "completion": decode_samples(self.tokenizer, [row.sample])[0],
            "finish_reason": row.sample.finish_reason,
            "score": self.experience.scores_B[b].item(),
            "rewards": rewards,
            "advantage": None if advantages_BT is None else advantages_BT[b][sampled_T].double().mean().item(),
            "contribution": self.measured.tokens_BT[b].sum().item(),
        }
        if with_tokens:
            places = sampled_T.nonzero().squeeze(1).tolist()
            sums_T = self.measured.tokens_BT[b]
            entry["tokens"] = [{"text": self._text(b, t), "contribution": sums_T[t].item()} for t in places]
        return entry

    def _text(self, b: int, t: int) -> str:
        return self.tokenizer.decode([int(self.experience.tokens_BT[b, t])])

    def tokens(self) -> list[dict[str, Any]]:
        """The tokens with the largest contributions."""
        tokens_BT = self.measured.tokens_BT
        order = tokens_BT.abs().flatten().argsort(descending=True, stable=True)[:TOKENS].tolist()
        tokens, size = [], self.experience.rows_per_unit
        ranks = {unit: rank for rank, unit in enumerate(self.order, start=1)}
        for b, t in (divmod(index, tokens_BT.shape[1]) for index in order):
            contribution = tokens_BT[b, t].item()
            if contribution == 0:
                break
            start = int(self.experience.sampled_BT[b].argmax())
            tokens.append(
                {
                    "text": self._text(b, t),
                    "before": self.tokenizer.decode(self.experience.tokens_BT[b, max(0, t - 6) : t].tolist()),
                    "completion": ranks[b // size],
                    "row": b % size,
                    "position": t - start,
                    "contribution": contribution,
                    "percent": self.percent(contribution),
                    "logprob": self.experience.behaviour_logprobs_BT[b, t].item(),
                    "moves": self.measured.moves_BT[b, t].item(),
                }
            )
        return tokens

    def vocabulary(self) -> list[dict[str, Any]]:
        """The tokens of the vocabulary whose places in the batch have the largest contribution together."""
        sampled_BT, tokens_BT = self._seen, self.experience.tokens_BT
        ids_N, place_N, counts_N = tokens_BT[sampled_BT].unique(return_inverse=True, return_counts=True)
        empty_N = torch.zeros(len(ids_N), dtype=torch.float64)
        sums_N = empty_N.index_add(0, place_N, self.measured.tokens_BT[sampled_BT])
        moves_N = empty_N.index_add(0, place_N, self.measured.moves_BT[sampled_BT]) / counts_N
        order = sums_N.abs().argsort(descending=True, stable=True)[:TOKENS].tolist()
        return [
            {
                "text": self.tokenizer.decode([int(ids_N[i])]),
                "places": int(counts_N[i]),
                "contribution": sums_N[i].item(),
                "percent": self.percent(sums_N[i].item()),
                "moves": moves_N[i].item(),
            }
            for i in order
            if sums_N[i] != 0
        ]

    def lag(self) -> dict[str, Any]:
        """How old the weights are that drew the batch, how far the policy is from them, and what corrected for it:
        means of importance weights and of clipping, by weight in the objective.
        """
        ratios_N = self.measured.log_ratios_BT[self._seen].double()
        loss_weights_U, corrections = self.experience.loss_weights_U.double(), {}
        for name, values_U in self.measured.metrics.items():
            weights_U = loss_weights_U * ~values_U.isnan()
            if name.startswith("policy/") and ("clip" in name or "importance" in name) and weights_U.sum() > 0:
                corrections[name] = ((values_U.nan_to_num() * weights_U).sum() / weights_U.sum()).item()
        return {
            "batches": self.update.batch - 1 - self.scored.batch.version,
            "mean_abs_log_ratio": ratios_N.abs().mean().item() if len(ratios_N) else None,
            "objective": corrections,
        }


def number(x: float) -> float | None:
    """For JSON, which knows no NaN."""
    return x if math.isfinite(x) else None
