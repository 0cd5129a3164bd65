"""The life of one sample: how it was drawn, what it was paid, what it added to the update, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.models.forward import response_logprobs
from async_rlhf.models.loading import load_policy
from async_rlhf.studies.explain.contributions import contributions
from async_rlhf.studies.explain.explanation import Account, number
from async_rlhf.studies.explain.update import RepeatableUpdate, load
from async_rlhf.types import Experience, Group, Sample, ScoredBatch


def life(
    update: RepeatableUpdate,
    scored: ScoredBatch,
    experience: Experience,
    after: Sequence[Tensor],
    which: int,
    tokenizer: Any,
    weights: Mapping[str, float],
    checkpoints: Mapping[int, Path],
) -> dict[str, Any]:
    """What is known of a sample, as JSON can hold it.

    Args:
        update: that can be repeated.
        scored: its batch.
        experience: what the learner made of it.
        after: the policy's weights after the update.
        which: the number of the sample in the batch, from 1.
        tokenizer: of the policy.
        weights: of each reward in the score.
        checkpoints: of the run after this batch, by batch.
    """
    groups = scored.batch.groups
    group, position = next(each for n, each in enumerate(_all(groups), 1) if n == which)
    sample, first = group.samples[position], which - position
    step = update.step_to(after)
    account = Account(update, experience, after, step, scored, contributions(update, experience, step), tokenizer)
    row = next((b for b, each in enumerate(account.rows) if each.number == which - 1), None)
    score = partial(_logprobs, update, sample)
    before_N, after_N = score(update.before), score(after)
    load(update.policy, after)
    trust = update.learner.config.trust_remote_code
    later = {batch: _at(path, sample, update, trust) for batch, path in checkpoints.items()}
    numbers = range(first, first + len(group.samples))
    unit = None if row is None else row // experience.rows_per_unit
    return {
        "sample": which,
        "draw": group.prompt.draw,
        "row": group.prompt.row,
        "columns": {name: str(value) for name, value in group.prompt.columns.items()},
        "prompt": tokenizer.decode(group.prompt.tokens),
        "completion": decode_samples(tokenizer, [sample])[0],
        "finish_reason": sample.finish_reason,
        "messages": None if sample.messages is None else [dict(message) for message in sample.messages],
        "environment": None if sample.rewards is None else sample.episode.get("rewards"),
        **_paid(account, which, weights, numbers),
        "trained_on": row is not None,
        "unit_weight": None if unit is None else experience.loss_weights_U[unit].item(),
        "percent": None if row is None else account.percent(account.measured.tokens_BT[row].sum().item()),
        "logprob": {
            "by_the_sampler": float(sample.logprobs[sample.sampled].sum()),
            "before": before_N.sum().item(),
            "after": after_N.sum().item(),
            **{f"checkpoint-{batch}": value for batch, value in later.items()},
        },
        "tokens": _tokens(account, sample, row, before_N, after_N),
    }


def _tokens(
    account: Account, sample: Sample, row: int | None, before_N: Tensor, after_N: Tensor
) -> list[dict[str, Any]]:
    """Each token that was drawn. The ratio is the policy's to the sampler's when the update first sees it."""
    experience, measured = account.experience, account.measured
    of_row = None if row is None else experience.sampled_BT[row] > 0
    ratios_N = None if row is None else measured.log_ratios_BT[row][of_row].exp()
    shares_N = None if row is None else measured.tokens_BT[row][of_row]
    return [
        {
            "position": int(place),
            "text": account.tokenizer.decode([int(sample.tokens[place])]),
            "version": int(sample.versions[place]),
            "by_the_sampler": float(sample.logprobs[place]),
            "before": before_N[n].item(),
            "ratio": None if ratios_N is None else ratios_N[n].item(),
            "percent": None if shares_N is None else account.percent(shares_N[n].item()),
            "after": after_N[n].item(),
        }
        for n, place in enumerate(sample.sampled.nonzero()[0])
    ]


def _paid(account: Account, which: int, weights: Mapping[str, float], numbers: Sequence[int]) -> dict[str, Any]:
    """Its rewards and score, and the scores and credit of its group, which has these numbers."""
    scored = account.scored
    return {
        "rewards": {
            name: {"value": number(x_R[which - 1].item()), "weight": weights.get(name, 1.0)}
            for name, x_R in scored.rewards.items()
        },
        "score": number(scored.scores_PK.flatten()[which - 1].item()),
        "group": [
            {"sample": n, "score": number(scored.scores_PK.flatten()[n - 1].item()), **_credit(account, n)}
            for n in numbers
        ],
    }


def _all(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    return [(group, position) for group in groups for position in range(len(group.samples))]


def _credit(account: Account, which: int) -> dict[str, Any]:
    """The advantage of a sample, and whether it is trained on."""
    row = next((b for b, each in enumerate(account.rows) if each.number == which - 1), None)
    advantages_BT = account.experience.advantages_BT
    if row is None or advantages_BT is None:
        return {"trained_on": row is not None, "advantage": None}
    drawn_T = account.experience.sampled_BT[row] > 0
    return {"trained_on": True, "advantage": advantages_BT[row][drawn_T].double().mean().item()}


def _logprobs(update: RepeatableUpdate, sample: Sample, weights: Sequence[Tensor]) -> Tensor:
    """(N,): of what was drawn, by the policy with these weights."""
    load(update.policy, weights)
    return _of_model(update.learner.policy, sample, update)


@torch.no_grad()
def _of_model(model: PreTrainedModel, sample: Sample, update: RepeatableUpdate) -> Tensor:
    learner, device = update.learner, next(model.parameters()).device
    tokens_BT, sampled_BT = (torch.from_numpy(x)[None].to(device) for x in (sample.tokens, sample.sampled))
    positions_BT = torch.from_numpy(sample.places)[None].to(device) if sample.starts else None
    temperature = learner.config.generation.temperature
    with learner.autocast(device):
        found = response_logprobs(
            model, tokens_BT.long(), sampled_BT.float(), temperature, False, positions_BT=positions_BT
        )
    return found.logprobs_BT[0][sampled_BT[0]].double().cpu()


def _at(path: Path, sample: Sample, update: RepeatableUpdate, trust: bool) -> float:
    """The log-probability of a sample by the policy of a checkpoint."""
    model = load_policy(str(path), device=next(update.learner.policy.parameters()).device, trust=trust)
    return _of_model(model, sample, update).sum().item()
