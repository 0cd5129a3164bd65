"""The benchmarks that start several processes, at their smallest size: what they print is possible. They
are rare: they take minutes, and guard no law.

Not at any size here: TRL's side of peers.py, which installs TRL from PyPI into an environment of its own; and peers.py
with the quickstart's models, which take minutes to make.
"""

from __future__ import annotations

import pytest
from printed import by_itself, columns, markdown, named, require

pytestmark = pytest.mark.rare
WAITING = {
    "pays.py": ({"cores only", "long tails", "slow rewards", "environments"}, "S0 S1 factor lowest highest"),
    "waits_evaluation.py": ({"none", "generators", "learner"}, "wall sampling training waited ratio predicted"),
    "waits_agents.py": ({"in process", "by HTTP"}, "seconds ratio"),
    "waits_environment.py": ({"in flight", "exact"}, "places wall bound over"),
    "waits_publish.py": ({"nothing", "in publish()", "beside"}, "wall publish wait stall predicted"),
    "waits_queue.py": ({"one queue", "batch by batch"}, "places wall predicted"),
    "waits_rewards.py": (
        {f"rewards {how}, S = {s}" for how in ("beside training", "in their turn") for s in (1, 2)},
        "wall sampling training score reference ratio bound predicted",
    ),
    "waits_shares.py": ({"units", "whole shares", "fixed shares"}, "wall best over_best idle predicted"),
}
PARTS = "rounding", "to the host", "checksums", "to a device"
"""Of the way of weights."""
SHARES = {"stall", "places", "idle"}


@pytest.mark.parametrize("name", WAITING)
def test_waits(name):
    ways, figures = WAITING[name]
    found = named(by_itself(name))
    assert found.keys() == ways
    for way, values in found.items():
        # Of fixed shares nothing is predicted.
        assert [*values] == figures.split()[: 4 if way == "fixed shares" else None]
        for figure, value in values.items():
            require(value, 0.0, 1.0 if figure in SHARES else 1000.0)


def test_publish():
    rows = columns(by_itself("publish.py", "--device", "cpu"), 12, ["GB/s", "seconds", "the first", "stall"])
    assert [row[""] for row in rows] == ["device", "host", "folder", "network", "raw", *PARTS]
    for row in rows:
        require(row["GB/s"], 1e-3, 1000)
        require(row["seconds"])
        require(row["the first"])
        assert row["stall"] == "-" if row[""] in ("network", "raw", *PARTS) else float(row["stall"]) >= 0


def test_loading():
    _, *rows = by_itself("loading.py").splitlines()
    assert [row.split(":")[0].strip() for row in rows] == ["whole", "spread"]
    for row in rows:
        require(row.partition("peak")[2])


def test_episodes():
    (rows,) = markdown(by_itself("episodes.py"))
    assert [(row["task"], row["algorithm"], row["S"], row["seed"]) for row in rows] == [
        (task, "grpo", "1", "0") for task in ("guess", "sums")
    ]
    for row in rows:
        require(row["before"], 0, 100)
        require(row["after"], 0, 100)
        require(row["seconds"])


def test_memory():
    (rows,) = markdown(by_itself("memory.py"))
    for row in rows:
        figures = list(row.values())[1:]
        for cell in figures:
            require(cell, 0, 1000)
        most = max(float(cell.split()[0]) for cell in figures[:3])
        assert sum(map(float, figures[3:])) == pytest.approx(most, abs=0.5)


def test_peers_our_side(tmp_path):
    text = by_itself("peers.py", "--ways", "in turn", "at once", "--out", str(tmp_path))
    header, *rows = text.splitlines()[-3:]
    assert header.split("  ")[0] == "case"
    assert [row[24:33].strip() for row in rows] == ["in turn", "at once"]
    for row in rows:
        require(row[33:59], 0.001)


def test_mutants(tmp_path):
    (rows,) = markdown(by_itself("mutants.py", "--results", str(tmp_path / "mutants.jsonl")))
    (row,) = rows
    assert row["module"] == "run.schedule"
    assert int(row["killed"]) + int(row["equivalent"]) + int(row["alive"]) == 1


def test_faults():
    """One run, killed once: ends as if never touched, or the exit code is not 0."""
    (rows,) = markdown(by_itself("faults.py"))
    assert [(row["kills that ended it"], row["outcome"]) for row in rows] == [("1", "identical")]
