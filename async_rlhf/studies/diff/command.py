"""Compares runs: what is unlike, where they part, and why."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.data.loading import load_rows
from async_rlhf.studies.diff.causes import Difference, differences, most_likely
from async_rlhf.studies.diff.config import DiffConfig
from async_rlhf.studies.diff.reading import UPDATE, ReadRun, first_difference, parts, read_run, require_comparable
from async_rlhf.studies.diff.values import first_values, kept_values, repeat
from async_rlhf.studies.templates import filled
from async_rlhf.system.files import write_file

logger = logging.getLogger(__name__)


def run_diff(config: DiffConfig) -> dict[str, Any]:
    """Compare runs, print what was found, and exit with code 1 if they differ.

    Raises:
        ConfigError: they cannot be compared.
    """
    account = compare(config)
    print(filled("diff", account, short=lambda x: x if len(text := str(x)) <= 60 else f"{text[:57]}..."))
    if config.out is not None:
        write_file(Path(config.out).expanduser(), json.dumps(account, indent=1, default=str) + "\n")
    if not account["equal"]:
        sys.exit(1)
    return account


def compare(config: DiffConfig) -> dict[str, Any]:
    """What is found, for JSON and the page."""
    require(config.batches is None or len(config.runs) == 1, "batches", config.batches, "must be null for several runs")
    require(not config.repeat or len(config.runs) == 2, "repeat", config.repeat, "must be false but for two runs")
    runs = [read_run(name) for name in config.runs]
    for other in runs[1:]:
        require_comparable(runs[0], other)
    if len(runs) == 1:
        return _with_itself(runs[0], config.batches)
    if len(runs) > 2:
        return _table(runs)
    return _pair(runs[0], runs[1], config.repeat)


def _pair(a: ReadRun, b: ReadRun, repeats: bool = False) -> dict[str, Any]:
    unlike, where, both = differences(a, b), first_difference(a, b), sorted(a.batches & b.batches)
    account: dict[str, Any] = {
        "runs": [a.name, b.name],
        "given": [each._asdict() | {"text": each.text, "touches": sorted(each.touches)} for each in unlike],
        "equal": where is None,
        "compared": {"first": both[0], "last": both[-1], "by": "digests" if a.digests and b.digests else "metrics"},
        "only_in_one": sorted(a.batches ^ b.batches),
        "rows": None,
        "table": None,
        "values": None,
        "part": None,
    }
    if where is None:
        return account
    batch, part = where
    equal = {name for name, same in _equalities(a, b, batch) if same}
    values: Any = next((pair for name, *pair in parts(a, b, batch) if name == part), [{}, {}])
    changed = [name for name in values[0] if values[0][name] != values[1][name]] if part == UPDATE else []
    account["other_tokens"] = next((n for n in both if ("tokens", False) in _equalities(a, b, n)), None)
    account |= {"batch": batch, "part": part, "metrics": {name: [x[name] for x in values] for name in changed}}
    if any(each.name == "train_dataset" for each in unlike):
        account["rows"] = _rows(a, b)
    account["cause"] = most_likely(_with_rows(unlike, account["rows"]), part, changed, equal)
    account["values"] = kept_values([a.name, b.name], batch)
    if repeats:
        account["values"] = (
            first_values([a.name, b.name], batch, part) or "nothing differs where both are repeated here"
        )
    return account


def _equalities(a: ReadRun, b: ReadRun, batch: int) -> list[tuple[str, bool]]:
    return [(name, ours == theirs) for name, ours, theirs in parts(a, b, batch)]


def _with_rows(unlike: list[Difference], rows: str | None) -> list[Difference]:
    """The same, where a row is named in place of the file that it is in."""
    if rows is None:
        return unlike
    named = [each._replace(name=rows) if each.name == "train_dataset" else each for each in unlike]
    return [each for each in named if each.name != "data.train"]


def _rows(a: ReadRun, b: ReadRun) -> str:
    """Where the prompts of two runs differ, in words, as far as their files still say."""
    names = [run.config.get("data.train") for run in (a, b)]
    try:
        first, second = (
            load_rows(str(name), str(run.config.get("data.split") or "train"), key="data.train")
            for name, run in zip(names, (a, b), strict=True)
        )
    except ConfigError as error:
        return f"the training data (they cannot be compared row by row: {error})"
    for number, (ours, theirs) in enumerate(zip_longest(first, second), 1):
        if ours is None or theirs is None:
            return f"the training data: {len(first)} rows in the first, {len(second)} in the second"
        if ours != theirs:
            columns = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            texts = [sorted(json.dumps(row, sort_keys=True, default=str) for row in rows) for rows in (first, second)]
            how = "the same rows in another order, from" if texts[0] == texts[1] else "the first to differ is"
            return f"the training data: {how} row {number} ({', '.join(columns)})"
    return (
        "the training data as they were read: the rows of the files are equal now, so the files have changed since, "
        "or their prompts were written in another way"
    )


def _with_itself(run: ReadRun, batches: int | None) -> dict[str, Any]:
    """Whether a run repeats here: it is repeated from its beginning, and compared with what it noted."""
    last = min(batches or max(run.batches), max(run.batches))
    logger.info("diff: repeats %d batches of %s from its beginning", last, run.name)
    with tempfile.TemporaryDirectory(prefix="diff-") as scratch:
        folder = Path(scratch, "repeated")
        repeat(run.name, last, folder, whole=True)
        again = read_run(str(folder / "run"))
    # What a repetition leaves out, such as checkpoints, is no cause.
    return _pair(run, replace(again, name=f"{run.name}, repeated here", config=run.config))


def _table(runs: list[ReadRun]) -> dict[str, Any]:
    """Which of many runs are equal up to where."""
    rows = []
    for i, a in enumerate(runs):
        for b in runs[i + 1 :]:
            require_comparable(a, b)
            where = first_difference(a, b)
            cause = None
            if where is not None:
                pair = _pair(a, b)
                cause = pair["cause"]
            rows.append({"runs": [a.name, b.name], "where": where, "until": max(a.batches & b.batches), "cause": cause})
    return {"runs": [run.name for run in runs], "equal": all(row["where"] is None for row in rows), "table": rows}
