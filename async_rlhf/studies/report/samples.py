"""Which completions the page holds: the same prompts over runs and batches first, and no more than fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from async_rlhf.run.episodes import conversation
from async_rlhf.studies.report.reading import Evaluation, ReadRun

LONGEST = 3000
"""Characters of one text; the rest is counted."""


Answers = dict[str, list[dict[str, Any]]]
"""Prompt -> its answers."""


def samples(
    runs: Sequence[ReadRun], evaluations: Sequence[Evaluation], characters: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Choose at most so many characters of completions.

    Held-out prompts keep all their answers, so that one sees a prompt change; of training, whole batches are taken, at
    equal distances, so that runs with the same prompts show the same ones.

    Returns:
        Completions by prompt, each {"kind", "prompt", "answers": [{"run", "batch", "score", "text", "finish"}]}, and
        of episodes "metrics"; and what was left out, in words.
    """
    batches = _shared_batches(runs, characters // 3)
    sources: dict[str, Answers] = {"evaluation": {}, "held-out prompts": {}, "training": {}}
    for evaluation in evaluations:
        _add_evaluation(sources["evaluation"], evaluation)
    for run in runs:
        _add(sources["held-out prompts"], run, run.eval_samples)
        _add(sources["training"], run, (row for row in _with_lives(run) if row.get("batch") in batches))
    groups, notes = [], []
    for kind, prompts in sources.items():
        shown = _within(kind, prompts, characters // max(1, sum(map(bool, sources.values()))))
        groups += shown
        if len(shown) < len(prompts):
            notes.append(f"{kind}: {len(shown)} of {len(prompts)} prompts are here")
    for run in runs:
        numbers = {row.get("batch") for row in run.samples}
        here, whole = len(numbers & batches), len(numbers)
        if here < whole:
            notes.append(f"{run.name}: training samples of {here} of {whole} batches; all are in samples.jsonl")
    return groups, notes


def _with_lives(run: ReadRun) -> Iterator[dict[str, Any]]:
    """The samples of a run, each with what ``explain --sample`` has written of it, or else that command."""
    numbers = Counter[Any]()
    for row in run.samples:
        batch = row.get("batch")
        numbers[batch] += 1
        file = run.folder / "explain" / f"explain-{batch}-sample-{numbers[batch]}.txt"
        life = f"async-rlhf explain {run.folder} --sample {batch}/{numbers[batch]}"
        with suppress(OSError):
            life = file.read_text(encoding="utf-8", errors="replace")
        yield {**row, "life": life}


def _within(kind: str, prompts: Answers, room: int) -> list[dict[str, Any]]:
    shown = []
    for prompt, answers in prompts.items():
        group = {"kind": kind, "prompt": _cut(prompt), "answers": answers}
        room -= len(group["prompt"]) + sum(len(answer["text"]) + len(answer.get("life", "")) + 60 for answer in answers)
        if room < 0:
            break
        shown.append(group)
    return shown


def _shared_batches(runs: Sequence[ReadRun], characters: int) -> set[Any]:
    """Batches at equal distances, the first and the last among them, as many as fit."""
    rows = [row for run in runs for row in run.samples]
    batches = sorted({row["batch"] for row in rows if "batch" in row})
    whole = sum(60 + sum(min(LONGEST, len(str(row.get(key, "")))) for key in ("prompt", "completion")) for row in rows)
    step = max(1, math.ceil(whole / max(1, characters)))
    return {*batches[::step], *batches[-1:]}


def _add(prompts: Answers, run: ReadRun, rows: Iterable[Mapping[str, Any]]) -> None:
    for row in rows:
        if "prompt" in row and "completion" in row:
            finish = str(row.get("finish_reason", ""))
            said = row.get("messages")
            text = conversation(said, row.get("rewards") or ()) if said else row["completion"]
            answer = _answer(run.name, row.get("batch"), row.get("score"), text, finish)
            prompts.setdefault(str(row["prompt"]), []).append(
                {**answer, "metrics": row.get("metrics") or {}, "life": row.get("life", "")}
            )


def _add_evaluation(prompts: Answers, evaluation: Evaluation) -> None:
    for row in evaluation.samples:
        answers = prompts.setdefault(str(row.get("query", "")), [])
        if (human := row.get("reference_response")) is not None:
            answers.append(_answer("human", None, row.get("reference_score"), human))
        for name, answer in (row.get("models") or {}).items():
            finish = "" if answer.get("ended", True) else "length"
            answers.append(_answer(name, None, answer.get("score"), answer.get("completion", ""), finish))


def _answer(run: str, batch: Any, score: Any, text: Any, finish: str = "") -> dict[str, Any]:
    return {"run": run, "batch": batch, "score": score, "text": _cut(str(text)), "finish": finish}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"
