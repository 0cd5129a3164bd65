"""What in a run should make its owner look twice: each with the figure, and with what to do.

Thresholds are here; those of measures that part from the score are in drift.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from async_rlhf.commands.evaluation.statistics import t_quantile
from async_rlhf.run.warnings import IDLE, MANY
from async_rlhf.studies.report.drift import FEWEST, Mean, StartAndEnd, drifts, values_of
from async_rlhf.studies.report.idleness import idleness
from async_rlhf.studies.report.plots import CHECKPOINT
from async_rlhf.studies.report.reading import Evaluation, ReadRun, of_runs


class Thresholds(NamedTuple):
    """A figure beyond one of these gets a warning."""

    cut_off: float = MANY
    """Share of completions that do not end by themselves."""
    ties: float = 0.3
    """Share of prompts whose completions all score the same."""
    kl_per_token: float = 0.5
    """Nats per token to the reference."""
    clipped: float = 0.3
    """Share of ratios that are clipped."""
    capped: float = 0.1
    """Share of importance weights at their cap."""
    ess_token: float = 0.7
    """Effective sample size by token, as a share."""
    ess_sequence: float = 0.3
    """The same by completion."""
    engine: float = 0.05
    """Mean nats per token between engine and learner with the same weights."""
    evidence: float = 3.0
    """log10 of the evidence that tokens are not distributed as they should be; 4.7 stops a run."""
    gradient: float = 10.0
    """Factor between the largest gradient norm and the median."""
    waited: float = 0.3
    """Share of the time that one side waits while the other works."""


THRESHOLDS = Thresholds()
ENOUGH = 12
"""Logged batches from which a score should have risen."""


class Warned(NamedTuple):
    """A warning: ``level`` 1 is about results, 2 about speed or the record."""

    title: str
    text: str
    level: Literal[1, 2] = 1
    run: str = ""
    """Its name."""


def _ends(run: ReadRun, key: str) -> StartAndEnd:
    return StartAndEnd(values_of(run.rows, key))


def warnings(runs: Sequence[ReadRun], evaluations: Sequence[Evaluation] = ()) -> list[Warned]:
    """All warnings, those about results first."""
    messages = [warned._replace(run=run.name) for run in runs for rule in RULES for warned in rule(run)]
    messages += [warned for evaluation in evaluations for warned in _gold_falls(evaluation, runs)]
    return sorted(messages, key=lambda warned: warned.level)


def _teaches_little(run: ReadRun) -> Iterator[Warned]:
    cut = {what: (values_of(run.rows, f"episode/out_of_{what}") or [0.0])[-1] for what in ("turns", "room")}
    for what, key in (("room", "episode_length"), ("turns", "max_turns")):
        if cut[what] >= THRESHOLDS.cut_off:
            had = run.config.get(f"generation.{key}")
            yield Warned(
                f"Episodes end for want of {what}",
                f"generation.{key}{f' ({had})' if had else ''} cut off {cut[what]:.0%} of the last episodes, with what "
                "the environment says. Give them more, or have the environment say less.",
            )
    share = 1 - _ends(run, "val/ended_share").end.mean - sum(cut.values())
    if share >= THRESHOLDS.cut_off:
        most = run.config.get("generation.response_length")
        cost = ", and penalised by non_eos_penalty" if run.config.get("non_eos_penalty") else ""
        yield Warned(
            "Answers are cut off",
            f"{share:.0%} of the last completions did not end by themselves{f' within {most} tokens' if most else ''}"
            f"{cost}. Give them more room (generation.response_length), or see whether the policy learns to go on.",
        )
    counted = [row for row in run.rows if "objective/ties" in row and row.get("episode")]
    share = StartAndEnd([row["objective/ties"] * row["batch"] / row["episode"] for row in counted]).end.mean
    if share >= THRESHOLDS.ties:
        text = f"All completions of {share:.0%} of the last prompts score the same: nothing says which is better. Use a"
        text += " finer reward, harder or easier prompts, more samples_per_prompt or a higher temperature."
        yield Warned("Many prompts teach nothing", text)


def _stays(run: ReadRun) -> Iterator[Warned]:
    """The score of the last third of the batches is not above that of the first, beyond chance."""
    scores = values_of(run.rows, "objective/scores")
    third = len(scores) // 3
    if len(scores) < ENOUGH:
        return
    first, last = Mean(scores[:third]), Mean(scores[-third:])
    rise, half = last.mean - first.mean, t_quantile(third - 1) * math.hypot(first.error, last.error)
    if rise <= half:
        what, chance = ("has fallen", "") if rise < -half else ("has not risen", ", which may be chance")
        text = f"It was {first:.3g} in the first third of the batches and {last:.3g} in the last: {rise:+.3g} "
        text += f"[{rise - half:+.3g}, {rise + half:+.3g}] (95%, over batches){chance}. Look at the starting model, "
        text += 'the learning rate, ties and the room for answers: "The reward does not rise" in the documentation '
        yield Warned(f"The score {what}", f"{text}(docs/reward_does_not_rise.md) has them in order.")


def _kl(run: ReadRun) -> Iterator[Warned]:
    kl, length = _ends(run, "objective/kl"), _ends(run, "val/response_length")
    if length.end.mean > 0 and (per_token := kl.end.mean / length.end.mean) >= THRESHOLDS.kl_per_token:
        text = (
            f"KL is {kl.end:.3g} nats per completion at the end, {per_token:.2f} per token. Read samples: so far away "
        )
        text += (
            "a reward model judges text of a kind that it has hardly seen. A lower learning rate, fewer batches, or "
        )
        yield Warned("Far from the reference", f"{text}a larger beta or KL penalty keeps the policy closer.")


def _off_policy(run: ReadRun) -> Iterator[Warned]:
    stale = f" S is {run.staleness}." if run.staleness else ""
    remedy = f"{stale} Lower the learning rate, staleness, num_mini_batches or num_epochs, or use a correction."
    for name, bound, unit in (
        ("token", THRESHOLDS.ess_token, "tokens"),
        ("sequence", THRESHOLDS.ess_sequence, "completions"),
    ):
        if (size := _ends(run, f"val/ess_{name}").end).mean < bound:
            text = f"The last batches are worth {size:.0%} of their {unit}: the policy in training is far from the one"
            yield Warned("The effective sample size is low", f"{text} that sampled.{remedy}")
    for key, bound, what in (
        ("clipfrac_avg", THRESHOLDS.clipped, "of the ratios are clipped, and what is clipped teaches nothing"),
        ("importance_capped", THRESHOLDS.capped, "of the importance weights are at their cap, which biases them"),
    ):
        if (part := _ends(run, f"policy/{key}").end).mean >= bound:
            yield Warned("Much is clipped", f"At the end {part:.0%} {what}.{remedy}")


def _hacking(run: ReadRun) -> Iterator[Warned]:
    score = _ends(run, "objective/scores")
    up = f"training score rose from {score.start:.3g} to {score.end:.3g}"
    held_out = values_of(run.evals, "eval_objective/scores")
    if score.rises and len(held_out) >= 3 and held_out[-1] < held_out[0]:
        yield Warned(
            "Better in training, worse on held-out prompts",
            f"The {up}, that on held-out prompts fell from {held_out[0]:.3g} to {held_out[-1]:.3g}. The policy learns "
            "the training prompts by heart, or they differ in kind. Use more prompts, or an earlier checkpoint.",
        )
    for drift in drifts(run.rows, run.config.get("reward_weights") or ()):
        yield Warned(drift.title, drift.text)


def _engine(run: ReadRun) -> Iterator[Warned]:
    noise = _ends(run, "engine/logprob_difference").end
    if noise.mean >= THRESHOLDS.engine:
        text = f"With the same weights their log-probabilities differ by {noise:.3g} nats per token. Look at "
        text += "generation.dtype and the engine's options; a correction makes up for small differences."
        yield Warned("Engine and learner disagree", text)
    most, limit = max(values_of(run.rows, "engine/sampling_evidence"), default=-math.inf), THRESHOLDS.evidence
    if most >= limit:
        text = (
            f"The evidence reached {most:.1f} (a right engine reaches {limit:g} in one of {10**limit:,.0f} runs; 4.7 "
        )
        yield Warned(
            "The engine may not draw what it says", f"{text}stops one). Look at the engine's sampling options."
        )


def _steps(run: ReadRun) -> Iterator[Warned]:
    made = values_of(run.rows, "optimizer_steps")[-IDLE:]
    if made and not any(made):
        text = f"The last {len(made)} logged batches made no optimiser step: no completion had a reward, or those of "
        text += "each prompt all scored the same. Look at the samples and at reward/skipped."
        yield Warned("Nothing is learnt", text)
    norms = sorted((row["grad_norm"], row["batch"]) for row in run.rows if row.get("grad_norm"))
    if len(norms) >= FEWEST and norms[-1][0] >= THRESHOLDS.gradient * (median := norms[len(norms) // 2][0]):
        text = f"That of batch {norms[-1][1]:.0f} has the norm {norms[-1][0]:.3g}, the median is {median:.3g}. It is "
        text += "clipped to max_grad_norm; if this happens often, lower the learning rate."
        yield Warned("A gradient stands out", text)
    skipped, steps, lost = (
        sum(row.get(key, 0) for row in run.rows) for key in ("skipped_steps", "optimizer_steps", "reward/skipped")
    )
    if skipped > 0.05 * steps:
        text = f"{skipped:.0f} steps overflowed float16 and were left out. bf16 does not overflow."
        yield Warned("Steps are skipped", text)
    if lost:
        text = f"{lost:.0f} completions have none (reward_errors: skip). Look for errors of the reward in the log."
        yield Warned("Rewards are missing", text)


def _speed(run: ReadRun) -> Iterator[Warned]:
    shares = idleness(run.traces.values())
    if shares is None or shares.generators is None:
        return
    waited = shares.learner.get("wait", 0.0)
    if waited >= THRESHOLDS.waited and waited > shares.generators:
        more = "more or faster generators" if run.staleness else "staleness 1, so that both sides work at the same time"
        title, remedy = "The learner waits", f"Try {more}"
    elif shares.generators >= THRESHOLDS.waited:
        title, remedy = "Generators wait", "Give the learner more of the machine and generators less"
    else:
        return
    yield Warned(title, f"{shares.text} {remedy}; async-rlhf plan compares splits.", level=2)


def _record(run: ReadRun) -> Iterator[Warned]:
    if run.state == "interrupted":
        remedy = "The same command with --resume goes on from its newest checkpoint."
        yield Warned("Not finished", f"The run ended after batch {run.progress}. {remedy}", level=2)
    for problem in run.problems:
        yield Warned("The record has gaps", f"{problem}.", level=2)


def _gold_falls(evaluation: Evaluation, runs: Sequence[ReadRun]) -> Iterator[Warned]:
    """Between two checkpoints of a run: the best one is better than the last, and their intervals do not meet."""
    mine, name = of_runs(evaluation, runs), evaluation.results.get("reward", "reward")
    why = ": the policy exploits the reward that trains it" if name == "gold reward" else ""
    for run in runs:
        golds = {
            int(match[1]): figures["reward_mean"]
            for model, figures in evaluation.results["models"].items()
            if mine.get(model) == run.name and (match := CHECKPOINT.fullmatch(model)) and "reward_mean" in figures
        }
        if not golds:
            continue
        last, best = max(golds), max(golds, key=lambda batch: golds[batch]["estimate"])
        if golds[best]["low"] > golds[last]["high"]:
            yield Warned(
                f"The {name} is past its peak",
                f"It was {golds[best]['estimate']:.3f} at batch {best} and is {golds[last]['estimate']:.3f} at batch "
                f"{last}{why}. Use checkpoint-{best}, or stop early.",
                run=run.name,
            )


RULES = (_stays, _teaches_little, _kl, _off_policy, _hacking, _engine, _steps, _speed, _record)
