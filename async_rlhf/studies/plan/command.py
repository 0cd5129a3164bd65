"""``async-rlhf plan``: predict step time, idle shares, the best split and the smallest staleness that is enough."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from async_rlhf.algorithms.table import find
from async_rlhf.commands.evaluation.tables import rendered
from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.config.parsing import parse
from async_rlhf.generation.placement import threads_side_by_side
from async_rlhf.models.budget import with_least
from async_rlhf.models.gpu_defaults import decided
from async_rlhf.models.memory import Pass
from async_rlhf.run.config import RunConfig
from async_rlhf.run.folder import METRICS
from async_rlhf.run.record import ENVIRONMENT, RUN_FILE, starts_of
from async_rlhf.run.summary import better_threads, read_rows
from async_rlhf.studies.plan import simulate
from async_rlhf.studies.plan.config import PlanConfig
from async_rlhf.studies.plan.measured import MeasuredRun, read_run
from async_rlhf.studies.plan.roofline import Roofline, batch_of, filled
from async_rlhf.studies.plan.search import GAIN, Choice, Proposal, in_flight, propose, search, try_split
from async_rlhf.studies.plan.times import Scaled, Split, Times, times_of
from async_rlhf.studies.templates import count
from async_rlhf.studies.templates import filled as filled_page
from async_rlhf.system import trace
from async_rlhf.system.files import write_file

PLAN, TRACE = "plan.json", "trace.json"
_TRACKS = {simulate.LEARNER: trace.LEARNER, simulate.PUBLISHER: "publisher"}


@dataclass(frozen=True)
class Source:
    """The source of the times.

    Args:
        times: of any split.
        devices: number of devices to split.
        prompts: prompts of a batch, if known.
        text: the source in words.
        run: the run that measured the times, if any.
    """

    times: Times
    devices: int
    prompts: int | None
    text: str
    run: MeasuredRun | None = None


def run_plan(config: PlanConfig) -> dict[str, Any]:
    """Simulate every split and staleness, print the best choice, and write it to ``output_dir``, if set.

    Returns:
        The content of plan.json.
    """
    config = with_recipe(config)
    source = find_times(config)
    choices = search(source.times, source.devices, config)
    proposal = propose(choices, config.tolerance, config.in_turn)
    if proposal is None:
        reasons = list(dict.fromkeys(choice.why_not for choice in choices))
        more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise ConfigError(f"devices: got {source.devices}; no split is possible: {'; '.join(reasons[:3])}{more}")
    choices, proposal = _queued(choices, proposal, source.times, config)
    print(page(choices, proposal, source, config))
    results = report(choices, proposal, source)
    if config.output_dir is not None:
        folder = Path(config.output_dir)
        plan = json.dumps({"config": asdict(config), **results}, indent=2, allow_nan=False)
        write_file(folder / PLAN, plan + "\n")
        write_trace(proposal, folder / TRACE)
    return results


def _queued(
    choices: list[Choice], proposal: Proposal, times: Times, config: PlanConfig
) -> tuple[list[Choice], Proposal]:
    """The same, or with one queue over batches, if the configuration leaves that open and it is much faster."""
    work = config.workload
    if not isinstance(times, Roofline) or work.in_flight is not None or proposal.choice.split.in_turn:
        return choices, proposal
    if times.batch.response_tokens == times.batch.response_length or config.max_staleness == 0:
        return choices, proposal
    queued = in_flight(times, choices, config)
    faster = propose(queued, config.tolerance, in_turn=False)
    assert faster is not None
    gain = proposal.outcome.step_seconds / faster.outcome.step_seconds
    if gain < GAIN or faster.staleness == 0:
        return choices, proposal
    others = [choice for choice in choices if choice.split.in_turn or choice.why_not]
    return others + queued, replace(faster, synchronous=proposal.synchronous, in_flight=gain)


def with_recipe(config: PlanConfig) -> PlanConfig:
    """With what the recipe that ``run`` names says of a batch.

    Raises:
        ConfigError: something that evaluations or one queue over batches need is still open.
    """
    recipe = None if config.run is None or Path(config.run).is_dir() else _recipe(config.run)
    if recipe is not None:
        config = replace(config, workload=filled(config.workload, recipe))
    work = config.workload
    for key, needed in {
        "eval_completions": ("eval_steps", "prompts", "samples_per_prompt"),
        "in_flight": ("prompts", "samples_per_prompt", "response_length"),
        "prompts_per_request": ("prompts",),
    }.items():
        for name in needed if getattr(work, key) else ():
            require(getattr(work, name) is not None, f"workload.{name}", None, f"must be given with workload.{key}")
    return config


def find_times(config: PlanConfig) -> Source:
    """The source of the times that the configuration names.

    Raises:
        ConfigError: it names none, or more than one.
    """
    folder = config.run is not None and Path(config.run).is_dir()
    recipe = _recipe(config.run) if config.run is not None and not folder else None
    if config.model.parameters is not None:
        rule = "must be a YAML file, or null, with model.parameters: the times are either measured or estimated"
        require(not folder, "run", config.run, rule)
        assert config.devices is not None
        batch = batch_of(config.workload, recipe)
        text = (
            f"{config.devices} x {config.hardware.name}, {config.model.parameters / 1e9:.3g} billion parameters; "
            f"{batch.prompts} x {batch.samples_per_prompt} completions of {batch.prompt_tokens:g} + "
            f"{batch.response_tokens:g} tokens a batch (estimated)"
        )
        return Source(Roofline(config.hardware, config.model, batch), config.devices, batch.prompts, text)
    scaling, prompts = config.scaling, config.workload.prompts
    if config.seconds.generate is not None:
        rule = "must be a YAML file, or null, with seconds: the times are either measured or given"
        require(not folder, "run", config.run, rule)
        prompts = prompts or (recipe.train.batch_size if recipe else None)
        scaled = times_of(config.seconds, scaling, prompts, config.workload)
        text = f"seconds as given, for {_split(scaled.measured)}"
        return Source(scaled, config.devices or _devices(scaled.measured), prompts, text)
    rule = "must be the folder of a run; or give seconds.generate and seconds.train, or model.parameters"
    if config.run is None or not folder:
        raise ConfigError(f"run: got {config.run!r}; {rule}")
    run = read_run(Path(config.run), config.warm_up, scaling.learners)
    rule = f"must be null or {run.split.generators}, as the run has it"
    require(scaling.generators in (None, run.split.generators), "scaling.generators", scaling.generators, rule)
    text = (
        f"{config.run}: {len(run.rows)} batches measured with {_split(run.split)} at staleness {run.staleness}, "
        f"{run.step_seconds:.3g} s each"
    )
    times = Scaled(run.rows, run.split, scaling, run.prompts, config.workload)
    return Source(times, config.devices or _devices(run.split), run.prompts, text, run)


def _recipe(path: str) -> RunConfig:
    """The recipe as a GPU decides what it leaves open."""
    require(Path(path).is_file(), "run", path, "must be the output folder of a run, or the YAML file of one")
    try:
        recipe = parse(RunConfig, "train", ["--config", path])[0]
    except ConfigError as error:
        raise ConfigError(f"run: {path!r}: {error}") from error
    rows = find(recipe.algorithm).rows_per_unit
    train = decided(recipe.train, has_bf16=True, packs=True, rows_per_unit=rows)
    return replace(recipe, train=with_least(train, rows))  # what must fit decides whether the learner does


def _devices(split: Split) -> int:
    return max(2, split.generators + split.learners)


def _split(split: Split) -> str:
    """A split in words."""
    if split.in_turn:
        return f"{count(split.learners, 'device')} in turn"
    each = f" of {split.tensor_parallel} devices" if split.tensor_parallel > 1 else ""
    return f"{count(split.generators, 'generator')}{each} and {count(split.learners, 'learner')}"


def short(number: float) -> str:
    """A number with three digits, or with all digits before the decimal point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def table(choices: Sequence[Choice], proposal: Proposal, config: PlanConfig) -> str:
    """The fastest splits as plain text: seconds from batch to batch for each staleness, and idle times."""
    possible = [choice for choice in choices if choice.outcomes]
    by_speed = sorted(possible, key=lambda choice: choice.fastest)
    turns = [choice for choice in by_speed if choice.split.in_turn][:1]
    shown = [choice for choice in by_speed[: config.rows] if not choice.split.in_turn] + turns
    grid = Table(title="seconds a batch", title_justify="left")
    for title in ("generators", "learners", *(f"S = {s}" for s in range(config.max_staleness + 1))):
        grid.add_column(title, justify="right")
    for title in ("S", "generators idle", "learners idle", ""):
        grid.add_column(title, justify="right")
    for choice in sorted(shown, key=lambda choice: (not choice.split.in_turn, choice.split.generators)):
        enough = proposal.staleness if choice is proposal.choice else choice.enough(config.tolerance)
        at = choice.outcomes[enough]
        each = f" x {choice.split.tensor_parallel}" if choice.split.tensor_parallel > 1 else ""
        who = ("in turn", "in turn")
        if not choice.split.in_turn:
            who = (f"{choice.split.generators}{each}", str(choice.split.learners))
        seconds = [choice.outcomes.get(s) for s in range(config.max_staleness + 1)]
        cells = ["" if outcome is None else f"{outcome.step_seconds:.3g}" for outcome in seconds]
        idle = ("", "") if choice.split.in_turn else (f"{at.generator_idle:.0%}", f"{at.learner_idle:.0%}")
        grid.add_row(*who, *cells, str(enough), *idle, "<-" if choice is proposal.choice else "")
    refused = [f"{_split(choice.split)}: {choice.why_not}" for choice in choices if choice.why_not]
    more = [f"and {len(refused) - 3} more splits"] if len(refused) > 3 else []
    return "\n".join([rendered(grid, 200), *(f"Impossible: {line}" for line in refused[:3]), *more])


def page(choices: Sequence[Choice], proposal: Proposal, source: Source, config: PlanConfig) -> str:
    """What to set, what limits the speed, and what is gained; of a measured run also how well it is simulated."""
    split, times, run, simulated = proposal.choice.split, source.times, source.run, 0.0
    needs: dict[str, float] = {}
    recompute: bool | str = False
    utilization, update = "", Pass(0, 0)
    if isinstance(times, Roofline) and times.stages(split):
        share = times.room_of(split) / (times.hardware.memory_gb * 1e9)
        utilization = f"{share:.2f}" if share < times.hardware.memory_share else ""
    if isinstance(times, Roofline) and times.model.activations_gb is None:
        recompute = times.recompute(split.learners)
        needs = times.phases(split.learners, recompute)
        update = times.memory(split.learners, recompute).update
    if run is not None:
        again = try_split(times, run.split, replace(config, max_staleness=run.staleness))
        simulated = again.outcomes[run.staleness].step_seconds
    values = {"table": table(choices, proposal, config), "proposal": proposal, "source": source, "config": config}
    values |= {"needs": needs, "recompute": str(recompute) if recompute else "", "simulated": simulated}
    values |= {
        "utilization": utilization,
        "update": update,
        "threads": "" if run is None else threads_of(Path(str(config.run))),
    }
    return filled_page("plan", values, short=short, words=_split, gigabytes=lambda size: f"{size / 1e9:.0f}")


def threads_of(folder: Path) -> str:
    """Better numbers of threads for a measured run, both sides of which shared a CPU with as many cores as this one; ""
    if there are none, or the run did not begin as a command.
    """
    starts = starts_of(folder / ENVIRONMENT)
    if not starts or not (folder / RUN_FILE).is_file():
        return ""
    with suppress(ConfigError):  # of a run from Python, or of another version
        recipe = parse(RunConfig, "train", ["--config", str(folder / RUN_FILE)])[0]
        device, ranks = torch.device(str(starts[-1].get("device", "cpu"))), int(starts[-1].get("ranks", 1))
        threads = threads_side_by_side(recipe.train, device, ranks)
        return "" if threads is None else better_threads(read_rows(folder / METRICS), *threads)
    return ""


def report(choices: Sequence[Choice], proposal: Proposal, source: Source) -> dict[str, Any]:
    """Everything that was simulated, as in plan.json."""
    rows = []
    for choice in choices:
        shared = asdict(choice.split)
        if choice.why_not:
            rows.append({**shared, "why_not": choice.why_not})
        for staleness, outcome in choice.outcomes.items():
            rate = source.prompts / outcome.step_seconds if source.prompts else None
            speed = {"staleness": staleness, "step_seconds": outcome.step_seconds, "prompts_per_second": rate}
            shares = {name: getattr(outcome, name) for name in ("generator_idle", "learner_idle", "efficiency")}
            rows.append({**shared, **speed, **shares})
    seconds, rival = proposal.synchronous
    best = {**asdict(proposal.choice.split), "staleness": proposal.staleness}
    best |= {"step_seconds": proposal.outcome.step_seconds, "speed_up": proposal.speed_up}
    return {"best": best, "synchronous": {**asdict(rival), "step_seconds": seconds}, "choices": rows}


def write_trace(proposal: Proposal, path: Path) -> None:
    """The proposed schedule, simulated, in the format of a run's own trace."""
    with closing(trace.Trace()) as spans:
        spans.write_to(path)
        for span in proposal.outcome.spans:
            track = _TRACKS.get(span.track, f"generator {span.track}")
            spans.add(span.name, span.started, span.ended, track, batch=span.batch)
