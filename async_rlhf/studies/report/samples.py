"""Which completions the page holds: the same prompts over runs and batches first, and no more than fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_rlhf.studies.report.reading import Evaluation, ReadRun

LONGEST = 3000
"""Characters of one text; the rest is counted."""


@dataclass
class Samples:
    """Completions by prompt.

    Args:
        groups: {"kind", "prompt", "answers": [{"run", "batch", "score", "text", "finish"}]}.
        notes: what was left out, in words.
    """

    groups: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def samples(runs: Sequence[ReadRun], evaluations: Sequence[Evaluation], characters: int) -> Samples:
    """Choose at most so many characters of completions.

    Held-out prompts keep all their answers, so that one sees a prompt change; of training, whole batches are taken, at
    equal distances, so that runs with the same prompts show the same ones.
    """
    found = Samples()
    sources = (
        ("evaluation", [_of_evaluation(one) for one in evaluations]),
        ("held-out prompts", [_by_prompt(run.name, run.eval_samples) for run in runs]),
        ("training", [_by_batch(run, _shared_batches(runs, characters // 3)) for run in runs]),
    )
    parts = sum(1 for _, groups in sources if any(groups))
    for kind, groups in sources:
        merged: dict[str, list[dict[str, Any]]] = {}
        for group in groups:
            for prompt, answers in group.items():
                merged.setdefault(prompt, []).extend(answers)
        room = characters // max(1, parts)
        shown = _within(kind, merged, room)
        found.groups += shown
        whole, kept = len(merged), len(shown)
        if kept < whole:
            found.notes.append(f"{kind}: {kept} of {whole} prompts are here")
    for run in runs:
        batches = {row.get("batch") for row in run.samples}
        here = batches & _shared_batches(runs, characters // 3)
        if len(here) < len(batches):
            found.notes.append(
                f"{run.name}: training samples of {len(here)} of {len(batches)} batches; all are in samples.jsonl"
            )
    return found


def _within(kind: str, merged: Mapping[str, list[dict[str, Any]]], room: int) -> list[dict[str, Any]]:
    shown = []
    for prompt, answers in merged.items():
        group = {"kind": kind, "prompt": _cut(prompt), "answers": answers}
        room -= len(group["prompt"]) + sum(len(answer["text"]) + 60 for answer in answers)
        if room < 0:
            break
        shown.append(group)
    return shown


def _shared_batches(runs: Sequence[ReadRun], characters: int) -> set[Any]:
    """Batches at equal distances, the first and the last among them, as many as fit."""
    batches = sorted({row["batch"] for run in runs for row in run.samples if "batch" in row})
    whole = sum(_size(row) for run in runs for row in run.samples)
    step = max(1, -(-whole // max(1, characters)))
    return {*batches[::step], *batches[-1:]}


def _size(row: Mapping[str, Any]) -> int:
    return min(LONGEST, len(str(row.get("prompt", "")))) + min(LONGEST, len(str(row.get("completion", "")))) + 60


def _by_batch(run: ReadRun, batches: set[Any]) -> dict[str, list[dict[str, Any]]]:
    return _by_prompt(run.name, (row for row in run.samples if row.get("batch") in batches))


def _by_prompt(name: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "prompt" in row and "completion" in row:
            found.setdefault(str(row["prompt"]), []).append(
                {
                    "run": name,
                    "batch": row.get("batch"),
                    "score": row.get("score"),
                    "text": _cut(str(row["completion"])),
                    "finish": str(row.get("finish_reason", "")),
                }
            )
    return found


def _of_evaluation(evaluation: Evaluation) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in evaluation.samples:
        answers = []
        if row.get("reference_response") is not None:
            text, score = row["reference_response"], row.get("reference_score")
            answers.append({"run": "human", "batch": None, "score": score, "text": _cut(str(text)), "finish": ""})
        for name, one in (row.get("models") or {}).items():
            finish = "" if one.get("ended", True) else "length"
            text = _cut(str(one.get("completion", "")))
            answers.append({"run": name, "batch": None, "score": one.get("score"), "text": text, "finish": finish})
        found.setdefault(str(row.get("query", "")), []).extend(answers)
    return found


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST:,} more characters)"
