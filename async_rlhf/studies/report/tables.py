"""Tables of the page: heads and rows of texts; the first text of a row is its head."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from async_rlhf.commands.evaluation.tables import columns_of, filled
from async_rlhf.config.secrets import HIDDEN, masked
from async_rlhf.studies.report.reading import FREE_FORM, Evaluation, ReadRun

STATES = {"running": "running now", "finished": "finished", "interrupted": "ended before it was done"}
SAMPLING = {
    "generation.engine": "engine {}",
    "generation.temperature": "temperature {}",
    "generation.response_length": "at most {} tokens",
}
Rows = list[list[str]]


def overview(runs: Sequence[ReadRun]) -> tuple[list[str], Rows]:
    """What each run was, and how it ended: facts by run."""
    facts = {run.name: _facts(run) for run in runs}
    names = dict.fromkeys(name for column in facts.values() for name, text in column.items() if text)
    return ["", *facts], [[name, *(column[name] for column in facts.values())] for name in names]


def _facts(run: ReadRun) -> dict[str, str]:
    get, last = run.config.get, run.rows[-1] if run.rows else {}
    rate, staleness = get("learning_rate"), "" if run.staleness is None else str(run.staleness)
    mini_batches, epochs = get("num_mini_batches"), get("num_epochs")
    seconds = [row["time/batch"] for row in run.rows[2:] or run.rows if "time/batch" in row]
    again = len(run.starts) - 1
    more = f", and {again} more times" if again > 1 else ", and once more" if again == 1 else ""
    batch = ""
    if last.get("completions") and last.get("episode"):
        prompts, k = last["episode"] / last["batch"], last["completions"] / last["episode"]
        batch = f"{prompts:g} prompts, K = {k:g} completions of each"
    return {
        "state": f"{STATES[run.state]}, after batch {run.progress}",
        "algorithm": run.algorithm,
        "S, staleness": f"{staleness}, at most" if staleness and get("generation.in_flight") else staleness,
        "model": str(get("model") or ""),
        "reward": ", ".join(map(str, filter(None, [get("reward_model"), *get("reward_funcs", [])]))),
        "batch": batch,
        "N, mini-batches; T, epochs": f"{mini_batches}; {epochs}" if mini_batches and epochs else "",
        "learning rate": f"{rate:g}, {get('lr_scheduler_type', '')}" if isinstance(rate, (int, float)) else "",
        "sampling": ", ".join(words.format(get(key)) for key, words in SAMPLING.items() if get(key) is not None),
        "score": _ends([row["objective/scores"] for row in run.rows if "objective/scores" in row], 10),
        "held-out score": ", ".join(_held_out(run)),
        "KL at the end": f"{last['objective/kl']:.3g} nats" if "objective/kl" in last else "",
        "seconds a batch": f"{sum(seconds) / len(seconds):.2f}" if seconds else "",
        "started": "".join(_when(start) + more for start in run.starts[:1]),
        "folder": masked(str(run.folder)),
    }


def _held_out(run: ReadRun) -> Iterator[str]:
    """The first and the last evaluation."""
    rows = [row for row in run.evals if "eval_objective/scores" in row]
    for row in (*rows[:1], *rows[1:][-1:]):
        when = f"after batch {row['batch']:.0f}" if row["batch"] else "before training"
        yield f"{row['eval_objective/scores']:.3f} {when}"


def _ends(values: Sequence[float], parts: int) -> str:
    """Means over the first and the last of so many parts."""
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    count = max(1, len(values) // parts)
    return f"{sum(values[:count]) / count:.3f} at the start, {sum(values[-count:]) / count:.3f} at the end"


def _when(start: Mapping[str, Any]) -> str:
    return str(start.get("started", "")).replace("T", " ").replace("+00:00", " UTC")


def evaluation(judged: Evaluation) -> Iterator[tuple[list[str], Rows, str]]:
    """What judges say of each model, with 95% intervals in brackets."""
    results = judged.results
    caption = f"{results.get('prompts', '')} held-out prompts, 95% intervals in brackets"
    for columns, human in columns_of(results):
        said = results.get("reference_response") or None
        heads, rows = filled(columns, results["models"], said if human else None)
        if rows:
            yield heads, rows, caption
            caption = ""


def starts(runs: Sequence[ReadRun]) -> Iterator[list[str]]:
    """Every start of every run: when, where, with which versions."""
    for run in runs:
        for number, start in enumerate(run.starts, start=1):
            code, packages = start.get("async_rlhf") or {}, start.get("packages") or {}
            changed = " (changed)" if code.get("dirty") else ""
            commit = f" {str(code['commit'])[:10]}{changed}" if code.get("commit") else ""
            versions = ", ".join(f"{name} {version}" for name, version in packages.items())
            yield [
                f"{run.name}, start {number}" if len(run.starts) > 1 else run.name,
                _when(start),
                f"{start.get('device', '')}, {start.get('ranks', '')} rank(s)",
                f"{code.get('version', '')}{commit}",
                f"Python {start.get('python', '')}, {versions}; {start.get('system', '')}",
                " ".join(_words(start.get("command") or [])),
            ]


def faults(runs: Sequence[ReadRun]) -> Rows:
    """Generators that died or fell silent, and what became of them."""
    return [
        [run.name, trace, f"{fault.start:.1f} s", f"{fault.track} was {fault.name}", masked(fault.why)]
        for run in runs
        for trace, spans in run.traces.items()
        for fault in spans
        if fault.why
    ]


def _words(words: Sequence[Any]) -> Iterator[str]:
    """A command line, without the values of options to other programs: they may be secrets."""
    hide = False
    for word in map(str, words):
        option = word.startswith("--")
        name, equals, _ = word.partition("=")
        free = option and _is_free_form(name[2:])
        yield HIDDEN if hide and not option else f"{name}={HIDDEN}" if free and equals else _word(word)
        hide = free and not equals


def _is_free_form(key: str) -> bool:
    """Whether a key is of one of the groups of other programs, whatever groups that one is in."""
    return any(f".{group}." in f".{key.replace('-', '_')}." for group in FREE_FORM)


def _word(word: str) -> str:
    """A word of a command line. Groups and arguments of rewards are left out: they may hold secrets of others."""
    shown, *hidden = re.split(r"[{(]", masked(word), maxsplit=1)
    return f"{shown}{HIDDEN}" if hidden else shown


def configuration(runs: Sequence[ReadRun]) -> tuple[list[str], Rows, Rows]:
    """The heads, the keys that differ between the runs, and all keys."""
    configs = {run.name: run.config for run in runs if run.config}
    rows, differ = [], []
    for key in dict.fromkeys(key for config in configs.values() for key in config):
        values = [config.get(key) for config in configs.values()]
        rows.append([key, *("" if value is None else str(value) for value in values)])
        differ += rows[-1:] if len(set(map(repr, values))) > 1 else []
    return ["key", *configs], differ, rows
