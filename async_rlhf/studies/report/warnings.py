"""What in a run should make its owner look twice: each with the figure, and with what to do. Thresholds are here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from async_rlhf.run.truncation_warning import MANY
from async_rlhf.studies.report.idleness import idleness
from async_rlhf.studies.report.plots import CHECKPOINT
from async_rlhf.studies.report.reading import Evaluation, ReadRun, of_runs


@dataclass(frozen=True)
class Thresholds:
    """A figure beyond one of these gets a warning."""

    part: float = 0.1
    """Share of the logged batches that "the start" and "the end" are."""
    cut_off: float = MANY
    """Share of completions that do not end by themselves."""
    ties: float = 0.3
    """Share of prompts whose completions all score the same."""
    kl_per_token: float = 0.5
    """Nats per token to the reference."""
    kl_rise: float = 1.25
    """Factor by which KL grows over the second half of a run while the score does not."""
    clipped: float = 0.3
    """Share of ratios that are clipped."""
    capped: float = 0.1
    """Share of importance weights at their cap."""
    ess_token: float = 0.7
    """Effective sample size by token, as a share."""
    ess_sequence: float = 0.3
    """The same by completion."""
    entropy: float = 0.3
    """Share of the entropy at the start that is left."""
    length: float = 1.8
    """Factor by which completions have grown longer."""
    errors: float = 3.0
    """Standard errors by which two means must differ to count as different."""
    engine: float = 0.05
    """Mean nats per token between engine and learner with the same weights."""
    evidence: float = 3.0
    """log10 of the evidence that tokens are not distributed as they should be; 4.7 stops a run."""
    gradient: float = 10.0
    """Factor between the largest gradient norm and the median."""
    waited: float = 0.3
    """Share of the time that one side waits while the other works."""


THRESHOLDS = Thresholds()
FEWEST = 6
"""Logged batches from which start and end are compared."""


class Warned(NamedTuple):
    """A warning: ``level`` 1 is about results, 2 about speed or the record."""

    title: str
    text: str
    level: Literal[1, 2] = 1
    run: str = ""
    """Its name."""


class _Part(NamedTuple):
    mean: float
    error: float
    """Standard error of the mean."""


class _Ends:
    """The start and the end of one metric."""

    def __init__(self, rows: Sequence[Mapping[str, float]], key: str, part: float) -> None:
        self.values = [row[key] for row in rows if isinstance(row.get(key), (int, float))]
        count = max(2, round(part * len(self.values)))
        self.enough = len(self.values) >= FEWEST
        self.start, self.end = _part(self.values[:count]), _part(self.values[-count:])
        middle = len(self.values) // 2
        self.middle = _part(self.values[max(0, middle - count // 2 - 1) : middle + count // 2 + 1])

    def rises(self, errors: float) -> bool:
        return self.enough and _apart(self.start, self.end) > errors


def _part(values: Sequence[float]) -> _Part:
    if not values:
        return _Part(math.nan, math.nan)
    mean = sum(values) / len(values)
    if len(values) == 1:
        return _Part(mean, 0.0)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return _Part(mean, math.sqrt(variance / len(values)))


def _apart(low: _Part, high: _Part) -> float:
    """By how many standard errors the second mean is above the first."""
    error = math.hypot(low.error, high.error)
    difference = high.mean - low.mean
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def warnings(
    runs: Sequence[ReadRun], evaluations: Sequence[Evaluation] = (), limits: Thresholds = THRESHOLDS
) -> list[Warned]:
    """All warnings, those about results first."""
    found = [warned._replace(run=run.name) for run in runs for rule in RULES for warned in rule(run, limits)]
    for evaluation in evaluations:
        found += _gold_falls(evaluation, runs)
    return sorted(found, key=lambda warned: warned.level)


def _cut_off(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    ended = _Ends(run.rows, "val/ended_share", limits.part)
    if not ended.values:
        return
    share = 1 - ended.end.mean
    if share >= limits.cut_off:
        room = run.config.get("generation.response_length")
        cost = ", and penalised by non_eos_penalty" if run.config.get("non_eos_penalty") else ""
        yield Warned(
            "Answers are cut off",
            f"{share:.0%} of the last completions did not end by themselves{f' within {room} tokens' if room else ''}"
            f"{cost}. Give them more room (generation.response_length), or see whether the policy learns to go on.",
        )


def _ties(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    rows = [
        {"ties": row["objective/ties"] * row["batch"] / row["episode"]}
        for row in run.rows
        if "objective/ties" in row and row.get("episode")
    ]
    share = _Ends(rows, "ties", limits.part).end.mean
    if share >= limits.ties:
        yield Warned(
            "Many prompts teach nothing",
            f"All completions of {share:.0%} of the last prompts score the same: nothing says which is better. Use a "
            "finer reward, harder or easier prompts, more samples_per_prompt or a higher temperature.",
        )


def _kl(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    kl, length = (_Ends(run.rows, key, limits.part) for key in ("objective/kl", "val/response_length"))
    score = _Ends(run.rows, "objective/scores", limits.part)
    if kl.values and length.values and length.end.mean > 0:
        per_token = kl.end.mean / length.end.mean
        if per_token >= limits.kl_per_token:
            yield Warned(
                "Far from the reference",
                f"KL is {kl.end.mean:.3g} nats per completion at the end, {per_token:.2f} per token. Read samples: "
                "so far away a reward model judges text of a kind that it has hardly seen. A lower learning rate, "
                "fewer batches, or a larger beta or KL penalty keeps the policy closer.",
            )
    grows = kl.enough and kl.middle.mean > 0 and kl.end.mean / kl.middle.mean >= limits.kl_rise
    if grows and _apart(kl.middle, kl.end) > limits.errors and _apart(score.middle, score.end) < 1:
        yield Warned(
            "KL grows without a gain",
            f"Over the second half KL went from {kl.middle.mean:.3g} to {kl.end.mean:.3g} nats, the score from "
            f"{score.middle.mean:.3g} to {score.end.mean:.3g}. An earlier checkpoint is as good and closer to the "
            "reference; stop_at ends a run there.",
        )


def _off_policy(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    stale = f" S is {run.staleness}." if run.staleness else ""
    remedy = "Lower the learning rate, staleness, num_mini_batches or num_epochs, or use a correction."
    for key, bound, unit in (
        ("val/ess_token", limits.ess_token, "tokens"),
        ("val/ess_sequence", limits.ess_sequence, "completions"),
    ):
        size = _Ends(run.rows, key, limits.part)
        if size.values and size.end.mean < bound:
            yield Warned(
                "The effective sample size is low",
                f"The last batches are worth {size.end.mean:.0%} of their {unit}: the policy in training is far from "
                f"the one that sampled.{stale} {remedy}",
            )
    for key, bound, what in (
        ("policy/clipfrac_avg", limits.clipped, "of the ratios are clipped, and what is clipped teaches nothing"),
        ("policy/importance_capped", limits.capped, "of the importance weights are at their cap, which biases them"),
    ):
        share = _Ends(run.rows, key, limits.part)
        if share.values and share.end.mean >= bound:
            text = f"At the end {share.end.mean:.0%} {what}.{stale} {remedy}"
            yield Warned("Much is clipped", text)


def _hacking(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    score = _Ends(run.rows, "objective/scores", limits.part)
    rises = score.rises(limits.errors)
    up = f"The training score rose from {score.start.mean:.3g} to {score.end.mean:.3g}"
    held_out = [row["eval_objective/scores"] for row in run.evals if "eval_objective/scores" in row]
    if rises and len(held_out) >= 3 and held_out[-1] < held_out[0]:
        yield Warned(
            "Better in training, worse on held-out prompts",
            f"{up}, that on held-out prompts fell from {held_out[0]:.3g} to {held_out[-1]:.3g}. The policy learns the "
            "training prompts by heart, or they differ in kind. Use more prompts, or an earlier checkpoint.",
        )
    entropy = _Ends(run.rows, "policy/entropy_avg", limits.part)
    if entropy.enough and entropy.start.mean > 0 and entropy.end.mean <= limits.entropy * entropy.start.mean:
        yield Warned(
            "The policy has become narrow",
            f"Entropy per token fell from {entropy.start.mean:.3g} to {entropy.end.mean:.3g} nats"
            f"{'; ' + up[0].lower() + up[1:] if rises else ''}. Read samples: it may have found one phrase that the "
            "reward likes. A larger beta or KL penalty, or a lower learning rate, keeps it open.",
        )
    length = _Ends(run.rows, "val/response_length", limits.part)
    if rises and length.enough and length.start.mean > 0 and length.end.mean >= limits.length * length.start.mean:
        yield Warned(
            "Answers grow with the score",
            f"{up}, the length from {length.start.mean:.3g} to {length.end.mean:.3g} tokens. The reward may pay for "
            "length: compare at equal length (async-rlhf evaluate), or set length_penalty.",
        )


def _engine(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    noise = _Ends(run.rows, "engine/logprob_difference", limits.part)
    if noise.values and noise.end.mean >= limits.engine:
        yield Warned(
            "Engine and learner disagree",
            f"With the same weights their log-probabilities differ by {noise.end.mean:.3g} nats per token. Look at "
            "generation.dtype and the engine's options; a correction makes up for small differences.",
        )
    evidence = _Ends(run.rows, "engine/sampling_evidence", limits.part)
    if evidence.values and (most := max(evidence.values)) >= limits.evidence:
        yield Warned(
            "The engine may not draw what it says",
            f"The evidence reached {most:.1f} (a right engine reaches {limits.evidence:g} in one of "
            f"{10**limits.evidence:,.0f} runs; 4.7 stops one). Look at the engine's sampling options.",
        )


def _steps(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    norms = sorted(row["grad_norm"] for row in run.rows if row.get("grad_norm"))
    if len(norms) >= FEWEST and norms[-1] >= limits.gradient * norms[len(norms) // 2]:
        batch = max((row for row in run.rows if "grad_norm" in row), key=lambda row: row["grad_norm"])["batch"]
        yield Warned(
            "A gradient stands out",
            f"That of batch {batch:.0f} has the norm {norms[-1]:.3g}, the median is {norms[len(norms) // 2]:.3g}. It "
            "is clipped to max_grad_norm; if this happens often, lower the learning rate.",
        )
    skipped = sum(row.get("skipped_steps", 0) for row in run.rows)
    if skipped > 0.05 * sum(row.get("optimizer_steps", 0) for row in run.rows):
        text = f"{skipped:.0f} steps overflowed float16 and were left out. bf16 does not overflow."
        yield Warned("Steps are skipped", text)
    if lost := sum(row.get("reward/skipped", 0) for row in run.rows):
        text = f"{lost:.0f} completions have none (reward_errors: skip). Look for errors of the reward in the log."
        yield Warned("Rewards are missing", text)


def _speed(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    found = idleness(run.traces.values())
    if found is None or found.generators is None:
        return
    waited = found.learner.get("wait", 0.0)
    if waited >= limits.waited and waited > found.generators:
        more = "more or faster generators" if run.staleness else "staleness 1, so that both sides work at the same time"
        yield Warned("The learner waits", f"{found.text} Try {more}; async-rlhf plan compares splits.", level=2)
    elif found.generators >= limits.waited:
        text = (
            f"{found.text} Give the learner more of the machine and generators less; async-rlhf plan compares splits."
        )
        yield Warned("Generators wait", text, level=2)


def _record(run: ReadRun, limits: Thresholds) -> Iterator[Warned]:
    if run.state == "interrupted":
        of = f" of {run.planned}" if run.planned else ""
        yield Warned(
            "Not finished",
            f"The run ended after batch {run.batches}{of}. The same command with --resume goes on from its newest "
            "checkpoint.",
            level=2,
        )
    for problem in run.problems:
        yield Warned("The record has gaps", f"{problem}.", level=2)


def _gold_falls(evaluation: Evaluation, runs: Sequence[ReadRun]) -> Iterator[Warned]:
    """Between two checkpoints of a run: the best one is better than the last, and their intervals do not meet."""
    mine = of_runs(evaluation, runs)
    for run in runs:
        models = [
            (int(found[1]), evaluation.results["models"][model]["gold_mean"])
            for model, whose in mine.items()
            if whose == run.name
            and (found := CHECKPOINT.fullmatch(model))
            and "gold_mean" in evaluation.results["models"][model]
        ]
        if len(models) < 2:
            continue
        best, last = max(models, key=lambda one: one[1]["estimate"]), max(models, key=lambda one: one[0])
        if best[1]["low"] > last[1]["high"]:
            yield Warned(
                "The gold reward is past its peak",
                f"It was {best[1]['estimate']:.3f} at batch {best[0]} and is {last[1]['estimate']:.3f} at batch "
                f"{last[0]}: the policy exploits the reward that trains it. Use checkpoint-{best[0]}, or stop_at.",
                run=run.name,
            )


RULES: Iterable[Callable[[ReadRun, Thresholds], Iterator[Warned]]] = (
    _cut_off,
    _ties,
    _kl,
    _off_policy,
    _hacking,
    _engine,
    _steps,
    _speed,
    _record,
)
