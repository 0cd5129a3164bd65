"""A certificate of what staleness costs: pairs of runs, one after the other, until a sequential test has decided."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_rlhf.commands.stage import Source, Stage, json_lines
from async_rlhf.config import EvaluateConfig
from async_rlhf.config.base import require
from async_rlhf.data.loading import load_rows
from async_rlhf.studies.certify.bets import Question, fewest_pairs
from async_rlhf.studies.certify.certificate import in_order, line_of, looks, progress, summary_of, table, verdict_text
from async_rlhf.studies.certify.config import CertifyConfig
from async_rlhf.studies.sweep.command import FailedRunsError, check_trials, run_trials, start_jobs
from async_rlhf.studies.sweep.results import Results
from async_rlhf.studies.sweep.trials import Trial, of_setting, parsed_held_out, parsed_run
from async_rlhf.system.files import write_file
from async_rlhf.system.lock import hold

logger = logging.getLogger(__name__)

PAIRS, CERTIFICATE, TEXT = "pairs.jsonl", "certificate.json", "certificate.md"


def run_certify(config: CertifyConfig) -> dict[str, Any]:
    """Train and judge pairs of runs until the question is decided, or ``max_pairs`` are done.

    Writes plan.json (what was fixed before the first pair), pairs.jsonl (a line for each pair), certificate.json and
    certificate.md, in ``config.output_dir``.

    Returns:
        What certificate.json holds; docs/commands/certify.md describes it.

    Raises:
        ConfigError: pairs that cannot be run, or a plan that differs from the one before the first pair.
        FailedRunsError: a run failed. No pair may be left out, so nothing is decided until it is repeated.
    """
    trials = trials_of(config)
    check_trials(trials)
    _check_prompts(trials[0].held_out)
    question = question_of(config)
    least = fewest_pairs(question)
    rule = f"must be at least {least}: fewer cannot show that less than {config.breakdown_rate:g} of pairs break down"
    require(config.max_pairs >= least, "max_pairs", config.max_pairs, rule)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder / ".certify.lock", "output_dir", folder), closing(run_trials(trials, config)) as running:
        _fix(config)
        if config.of_gain:
            gain = _gain(config)
            question = question._replace(margin=question.margin * gain, bound=question.bound * gain, gain=gain)
        history = []
        known_as = {trial.name: (trial.run.train.staleness, trial.seed) for trial in trials}
        arrivals = ((*known_as[name], results) for name, results in _succeeded(running))
        pairs = in_order(arrivals, [trial.seed for trial in trials[::2]], config.staleness)
        for pair, known in looks(pairs, question):
            history.append((pair, known))
            write_file(folder / PAIRS, json_lines(line_of(*entry) for entry in history))
            logger.info("%s", progress(pair, known, question))
        summary = summary_of(history, question)
        text = f"{verdict_text(summary)}\n\n{table(history, question)}\n"
        write_file(folder / TEXT, text)
        write_file(folder / CERTIFICATE, json_lines([summary]))
    print(text)
    logger.info("certificate: %s", folder / CERTIFICATE)
    return summary


def question_of(config: CertifyConfig) -> Question:
    """What is asked; with ``of_gain`` margin and bound are still shares."""
    bound = 10 * config.margin if config.bound is None else config.bound
    return Question(config.staleness, config.margin, config.error, config.min_pairs, bound, config.breakdown_rate)


def trials_of(config: CertifyConfig) -> list[Trial]:
    """The runs of all pairs that there may be, pair by pair; with ``of_gain`` all but the first seed's.

    Raises:
        ConfigError: a configuration that cannot be run.
    """
    held_out = parsed_held_out(config)
    in_flight = parsed_run(config, {"train.staleness": config.staleness}).train.generation.in_flight
    rule = "must be false: a certificate is about runs of one staleness, and in flight it is at most that"
    require(not in_flight, "base.train.generation.in_flight", in_flight, rule)
    first = config.seed + config.of_gain
    return _trials(config, held_out, range(first, first + config.max_pairs))


def _trials(config: CertifyConfig, held_out: EvaluateConfig, seeds: Sequence[int]) -> list[Trial]:
    sides = [
        of_setting(config, held_out, {"staleness": str(staleness)}, {"train.staleness": staleness}, seeds)
        for staleness in (0, config.staleness)
    ]
    # Other answers for each pair, so that what one draw of them adds is averaged over pairs.
    return [
        replace(trial, held_out=replace(held_out, seed=held_out.seed + trial.seed))
        for pair in zip(*sides, strict=True)
        for trial in pair
    ]


def _gain(config: CertifyConfig) -> float:
    """What the run at S = 0 with the first seed gains in gold reward over the model it starts from.

    Raises:
        ConfigError: it gains nothing, so there are no shares of it.
        FailedRunsError: it failed.
    """
    pilot = _trials(config, parsed_held_out(config), [config.seed])[0]
    running = run_trials([pilot], config, start_jobs(config, [pilot]))
    golds = {name: results["gold"]["estimate"] for name, results in _succeeded(running)}
    trained = golds.pop(pilot.name)
    (start,) = golds.values()
    why = f"seed {config.seed} goes from a gold reward of {start:.4f} to {trained:.4f}, and there are no shares of"
    require(trained > start, "of_gain", True, f"must be false: {why} that")
    return trained - start


def _check_prompts(held_out: EvaluateConfig) -> None:
    """Require two prompts, for intervals over prompts. Those of the hub are counted only when they are answered."""
    rule = "must be at least 2, for intervals over prompts"
    require(held_out.max_prompts is None or held_out.max_prompts > 1, "held_out.max_prompts", 1, rule)
    if Path(held_out.data).expanduser().exists():
        rows = len(load_rows(held_out.data, held_out.split, key="held_out.data"))
        require(rows > 1, "held_out.data", held_out.data, f"has {rows} prompt; {rule}")


def _fix(config: CertifyConfig) -> None:
    """Write what must not change once a pair is known, or require that it has not changed."""
    inputs: dict[str, Source] = {"base": config.base} if isinstance(config.base, str) else {}
    plan = Stage(Path(config.output_dir), "plan of the certificate", config, inputs, marker_name="plan", locked=False)
    if plan.done() is None:
        plan.publish_files({}, {})


def _succeeded(running: Iterable[tuple[str, Results | None, str]]) -> Iterator[tuple[str, Results]]:
    """Name and results of each run as it ends. Raises FailedRunsError for one that has failed."""
    for name, results, error in running:
        if results is None:
            raise FailedRunsError(f"{name} failed; start the certificate again to repeat it:\n  {error}")
        yield name, results
