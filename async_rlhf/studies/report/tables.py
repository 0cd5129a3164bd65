"""Tables of the page. On a narrow screen a row becomes a list of its own, so nothing has to be moved sideways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

from async_rlhf.config.secrets import HIDDEN, masked
from async_rlhf.evaluation.tables import cell, columns_of
from async_rlhf.studies.report.reading import FREE_FORM, Evaluation, ReadRun

STATES = {"running": "running now", "finished": "finished", "interrupted": "ended before it was done"}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table; the first cell of a row is its head. Texts are escaped here."""
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f'<td data-head="{escape(head)}">{escape(text)}</td>' for head, text in zip(heads[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{said}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def overview(runs: Sequence[ReadRun]) -> str:
    """What each run was, and how it ended: facts by run."""
    facts = {run.name: _facts(run) for run in runs}
    names = list(dict.fromkeys(name for one in facts.values() for name in one))
    rows = [[name, *(one.get(name, "") for one in facts.values())] for name in names]
    return table(["", *facts], rows)


def _facts(run: ReadRun) -> dict[str, str]:
    config = run.config
    of = f" of {run.planned}" if run.planned else ""
    facts = {
        "state": f"{STATES[run.state]}, after batch {run.batches}{of}",
        "algorithm": run.algorithm,
        "S, staleness": f"{run.staleness}{', at most' if config.get('staleness_mode') == 'bounded' else ''}"
        if run.staleness is not None
        else "",
        "model": str(config.get("model") or ""),
        "parameters": f"{run.parameters:,}" if run.parameters else "",
        "reward": ", ".join(map(str, filter(None, [config.get("reward_model"), *config.get("reward_funcs", [])]))),
        "batch": _batch(run),
        "N, mini-batches; T, epochs": f"{config['num_mini_batches']}; {config['num_epochs']}"
        if {"num_mini_batches", "num_epochs"} <= config.keys()
        else "",
        "learning rate": _rate(config),
        "sampling": _sampling(config),
        "score": _ends(run, "objective/scores"),
        "held-out score": _ends(run, "eval_objective/scores"),
        "KL at the end": f"{run.rows[-1]['objective/kl']:.3g} nats"
        if run.rows and "objective/kl" in run.rows[-1]
        else "",
        "seconds a batch": _seconds(run),
        "started": _times(run),
        "folder": masked(str(run.folder)),
    }
    return {name: text for name, text in facts.items() if text}


def _batch(run: ReadRun) -> str:
    last = run.rows[-1] if run.rows else {}
    if not last.get("completions") or not last.get("episode"):
        return ""
    prompts, k = last["episode"] / last["batch"], last["completions"] / last["episode"]
    return f"{prompts:g} prompts, K = {k:g} completions of each"


def _rate(config: Mapping[str, Any]) -> str:
    rate = config.get("learning_rate")
    return f"{rate:g}, {config.get('lr_scheduler_type', '')}" if isinstance(rate, (int, float)) else ""


def _sampling(config: Mapping[str, Any]) -> str:
    parts = {
        "engine": config.get("generation.engine"),
        "temperature": config.get("generation.temperature"),
        "at most": config.get("generation.response_length"),
    }
    told = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    return f"{told} tokens" if parts["at most"] is not None else told


def _ends(run: ReadRun, key: str) -> str:
    values = [row[key] for row in (run.evals if key.startswith("eval_") else run.rows) if key in row]
    if not values:
        return ""
    count = max(1, len(values) // 10) if not key.startswith("eval_") else 1
    first, last = sum(values[:count]) / count, sum(values[-count:]) / count
    return f"{first:.3f} at the start, {last:.3f} at the end" if len(values) > 1 else f"{last:.3f}"


def _seconds(run: ReadRun) -> str:
    seconds = [row["time/batch"] for row in run.rows[2:] or run.rows if "time/batch" in row]
    return f"{sum(seconds) / len(seconds):.2f}" if seconds else ""


def _times(run: ReadRun) -> str:
    starts = [str(one.get("started", "")) for one in run.starts]
    if not starts:
        return ""
    more = f", and {len(starts) - 1} more times" if len(starts) > 2 else ", and once more" if len(starts) == 2 else ""
    return _when(starts[0]) + more


def _when(text: str) -> str:
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return text


def evaluation_table(evaluation: Evaluation) -> str:
    """What judges say of each model, with 95% intervals in brackets."""
    results, written = evaluation.results, []
    caption = f"{results.get('prompts', '')} held-out prompts, 95% intervals in brackets"
    for columns, human in columns_of(results):
        models = {name: one for name, one in results["models"].items() if any(key in one for key in columns.values())}
        shown = {head: key for head, key in columns.items() if any(key in one for one in models.values())}
        if not shown:
            continue
        rows = [[name, *(cell(key, one.get(key)) for key in shown.values())] for name, one in models.items()]
        if human and results.get("reference_response"):
            rows.append(["(human)", *(cell(key, results["reference_response"].get(key)) for key in shown.values())])
        written.append(table(["model", *shown], rows, caption))
        caption = ""
    notes = "".join(f"<p>{escape(str(note))}</p>" for note in results.get("notes", ()))
    return "\n".join(written) + notes


def environment(runs: Sequence[ReadRun]) -> str:
    """Every start of every run: when, where, with which versions."""
    rows = []
    for run in runs:
        for number, start in enumerate(run.starts, start=1):
            own, packages = start.get("async_rlhf") or {}, start.get("packages") or {}
            commit = (
                f" {str(own.get('commit'))[:10]}{' (changed)' if own.get('dirty') else ''}" if own.get("commit") else ""
            )
            versions = ", ".join(f"{name} {version}" for name, version in packages.items())
            rows.append(
                [
                    f"{run.name}, start {number}" if len(run.starts) > 1 else run.name,
                    _when(str(start.get("started", ""))),
                    f"{start.get('device', '')}, {start.get('ranks', '')} rank(s)",
                    f"{own.get('version', '')}{commit}",
                    f"Python {start.get('python', '')}, {versions}; {start.get('system', '')}",
                    " ".join(_words(start.get("command") or [])),
                ]
            )
    note = '<p class="small">A run that was resumed has a row for each start.</p>'
    return table(["run", "started", "device", "async_rlhf", "versions", "command"], rows) + note if rows else ""


def faults(runs: Sequence[ReadRun]) -> str:
    """Generators that died or fell silent, and what became of them."""
    rows = [
        [run.name, trace, f"{fault.start:.1f} s", f"{fault.track} was {fault.name}", masked(fault.why)]
        for run in runs
        for trace, found in run.faults.items()
        for fault in found
    ]
    return table(["run", "trace", "after", "what", "why"], rows, "Faults and restarts") if rows else ""


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
    text = masked(word)
    start = min((place for place in (text.find("{"), text.find("(")) if place >= 0), default=-1)
    return f"{text[:start]}{HIDDEN}" if start >= 0 else text


def configuration(runs: Sequence[ReadRun]) -> str:
    """What differs between the runs, and everything, folded."""
    configs = {run.name: run.config for run in runs if run.config}
    if not configs:
        return ""
    keys = list(dict.fromkeys(key for one in configs.values() for key in one))
    differs = [key for key in keys if len({repr(one.get(key)) for one in configs.values()}) > 1]

    def rows(names: Sequence[str]) -> list[list[str]]:
        return [[key, *(_value(one.get(key)) for one in configs.values())] for key in names]

    heads = ["key", *configs]
    parts = [f"<h3>What differs</h3>{table(heads, rows(differs))}"] if differs else []
    left_out = f'<p class="small">Without {", ".join(FREE_FORM)} and text arguments of rewards.</p>'
    parts.append(
        f'<details id="configuration"><summary>All {len(keys)} keys</summary>{table(heads, rows(keys))}{left_out}'
        "</details>"
    )
    return "".join(parts)


def _value(value: Any) -> str:
    return "" if value is None else str(value)
