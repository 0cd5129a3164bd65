"""Benchmarks as a user runs them, at their smallest size, and the tables in what they print."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
Rows = list[dict[str, str]]


def by_itself(name: str, *words: str) -> str:
    """What a benchmark prints that runs in a process of its own."""
    command = [sys.executable, str(BENCHMARKS / name), "--smallest", *words]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return _own(done.stdout)


def in_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, *words: str) -> str:
    """The same from this process, which has torch already: as ``python benchmarks/name --smallest`` runs it."""
    file = str(BENCHMARKS / name)
    monkeypatch.setattr(sys, "argv", [file, "--smallest", *words])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    capsys.readouterr()
    runpy.run_path(file, run_name="__main__")
    return _own(capsys.readouterr().out)


def _own(text: str) -> str:
    """Without what DeepSpeed logs to the standard output, where it is installed."""
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"\[\d{4}-\d\d-\d\d ", line))


def markdown(text: str) -> list[Rows]:
    """The rows of each table, by the titles of its columns; all rows have all columns."""
    tables, lines = [], text.splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"(\|---)+\|", line):
            titles, rows = _cells(lines[number - 1]), []
            for row in lines[number + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(titles, _cells(row), strict=True)))
            assert rows, line
            tables.append(rows)
    return tables


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("|")]


def columns(text: str, label: int, titles: Sequence[str]) -> Rows:
    """The rows of the table whose columns end where these titles end; the first ``label`` characters are its name."""
    pattern = r"\s+".join(map(re.escape, titles))
    lines = text.splitlines()
    start, found = next((i, found) for i, line in enumerate(lines) if (found := re.search(pattern + r"(\s|$)", line)))
    ends, place = [label], found.start()
    for title in titles:
        place = lines[start].index(title, place) + len(title)
        ends.append(place)
    rows = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        cells = [line[a:b].strip() for a, b in pairwise(ends)]
        rows.append({"": line[:label].strip(), **dict(zip(titles, cells, strict=True)), "rest": line[ends[-1] :]})
    assert rows, text
    return rows


def named(text: str) -> dict[str, dict[str, str]]:
    """Of lines such as ``units  wall 3.2  idle 0.1``: what each names, and the figures by name."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    return {name: dict(part.rsplit(" ", 1) for part in parts) for name, *parts in lines}


def require(cell: str, low: float = 0.0, high: float = math.inf) -> None:
    """A cell holds numbers, with or without "%", all of them possible."""
    numbers = re.findall(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", cell)
    assert numbers, f"no number in {cell!r}"
    assert "nan" not in cell, cell
    assert all(low <= float(number) <= high for number in numbers), f"{cell!r} is not in {low} to {high}"
