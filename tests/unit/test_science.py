"""The tables of the page on science are those of its data."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from async_rlhf.commands.evaluation.statistics import Interval

SCRIPT = Path(__file__).parents[2] / "scripts" / "science.py"
SPEC = importlib.util.spec_from_file_location("science", SCRIPT)
science = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(science)


@pytest.mark.parametrize("path", science.PAGES, ids=lambda path: path.stem)
def test_a_page_has_the_tables_that_its_data_give(path):
    assert science.page(path) == path.read_text(encoding="utf-8"), "python scripts/science.py"


def test_every_table_is_on_a_page():
    text = "".join(path.read_text(encoding="utf-8") for path in science.PAGES)
    assert all(text.count(f"<!-- {name} -->") == 1 for name in science.TABLES)


def test_every_run_has_judged_the_same_prompts():
    for name in ("rates", "robustness", "between", "second", "staleness", "mini_batches", "certificate"):
        runs = science.read(name)
        assert {len(run.scores) for run in runs} == {500}
        assert {score for run in runs for score in run.scores} == {0, 1}
        assert len({(*run.setting.items(), run.seed) for run in runs}) == len(runs)


def test_intervals_of_shares_stay_within_0_and_1():
    for share in (0.0, 0.002, 0.5, 0.998, 1.0):
        found = science.within(Interval(share, share - 0.1, share + 0.1))
        assert 0 < found.low < found.high < 1
    found = science.within(Interval(0.5, 0.49, 0.51))
    assert (found.low, found.high) == (pytest.approx(0.49, abs=1e-5), pytest.approx(0.51, abs=1e-5))


def test_p_values_are_corrected_for_their_number():
    assert science.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert science.holm([0.9, 0.8]) == [1.0, 1.0]
    rng = np.random.default_rng(0)
    wrong = sum(min(science.holm(rng.uniform(size=12).tolist())) <= 0.05 for _ in range(4000))
    assert 0.035 < wrong / 4000 < 0.06


def branch(seed: int, first: int, changes: list[float]) -> dict:
    right = {str(first + later): x for later, x in zip((0, 1, 2, 4, 8, 16), changes, strict=True)}
    return {"objective": "o", "seed": seed, "kind": "branch", "first": first, "count": 1, "age": 4, "right": right}


def test_changes_of_branches_are_means_over_seeds():
    rows = [branch(0, 25, [0.1, 0.0, 0.0, 0.0, 0.0, 0.0]), branch(1, 37, [0.3, 0.2, 0.2, 0.2, 0.2, 0.0])]
    kind = science.Branches("o", 1, 4, False, rows)
    change = kind.change(0)
    assert change.estimate == pytest.approx(0.2)
    assert change.high - change.estimate == pytest.approx(12.706 * 0.1, rel=1e-3)  # t with one degree of freedom
    # 0.2 just after, 0.1 from 1 to 8 batches later, then a straight line to 0 at 16.
    assert science.summed(kind) == pytest.approx(0.2 + 8 * 0.1 + sum(0.1 * (16 - t) / 8 for t in range(9, 17)))


def test_only_the_end_of_a_whole_run_is_kept():
    whole = {"kind": "base", "seed": 0, "right": {"1": 0.1, "2": 0.2}}
    assert science.compact(whole)["right"] == {"2": 0.2}
    one = branch(0, 3, [0.0] * 6)
    assert science.compact(one) == one


def put(folder: Path, name: str, rows: list[dict]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_who_moves_further_and_loses_more_is_correlated_with_what_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "DATA", tmp_path)
    judged, moved = [], []
    for i, name in enumerate("abc"):
        moved.append(
            {"objective": name, "seed": 0, "age": 4, "kl": 0.1 * i, "ess": 1 - 0.1 * i, "second_moment": 1.0 + i}
        )
        for seed, age in ((0, "0"), (0, "4"), (1, "0"), (1, "4")):
            right = 10 if age == "0" else 8 - 2 * i - seed
            setting = {"algorithm": name, "start": "first", "train.staleness": age}
            judged.append({"setting": setting, "seed": seed, "kl": 0.0, "scores": "1" * right + "0" * (10 - right)})
    put(tmp_path, "robustness", judged)
    put(tmp_path, "between", [])
    put(tmp_path, "drift", moved)
    assert list(science.drift())[-1] == "| rank correlation with what is lost | 4 | +1.00 | -1.00 | +1.00 | |"


def test_whole_runs_are_compared_seed_by_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "DATA", tmp_path)
    ends = {
        ("base", 0): 0.5,
        ("base", 1): 0.9,
        ("S = 4", 1): 0.8,
        ("S = 4", 0): 0.4,
        ("S = 16", 0): 0.3,
        ("S = 16", 1): 0.7,
    }
    whole = [{"objective": "o", "kind": kind, "seed": seed, "right": {"9": x}} for (kind, seed), x in ends.items()]
    old = [branch(seed, 25, [0.0] * 6) | {"age": age, "other": False} for seed in (0, 1) for age in (4, 16)]
    put(tmp_path, "impulse", [*whole, *old])
    assert list(science.whole_runs())[-1].split(" | ")[2:] == [
        "-0.100 [-0.100, -0.100]",
        "+0.00",
        "-0.200 [-0.200, -0.200]",
        "+0.00",
        "2 |",
    ]


def judged(setting: dict, seed: int, right: int, **more: float) -> dict:
    return {"setting": setting, "seed": seed, "kl": 0.5, "scores": "1" * right + "0" * (10 - right), **more}


def test_equal_time_compares_with_the_shorter_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "DATA", tmp_path)
    of = {age: {"algorithm": "a", "start": "first", "train.staleness": age} for age in ("0", "1", "16")}
    put(tmp_path, "robustness", [judged(of[age], seed, 9) for age in ("0", "16") for seed in (0, 1)])
    put(tmp_path, "between", [judged(of["1"], 0, 7)])
    put(tmp_path, "time", [judged(of["0"], seed, 6) for seed in (0, 1)])
    assert [cell.split(" ")[0] for cell in list(science.equal_time())[-1].split(" | ")] == [
        "|",
        "0.600",
        "+0.100",
        "+0.300",
    ]


def test_a_sweeps_table_has_the_axes_that_vary(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "DATA", tmp_path)
    settings = [{"algorithm": "a", "train.learning_rate": "0.1", "train.staleness": age} for age in ("0", "4")]
    rows = [judged(one, seed, 5 + i, ess=0.75) for i, one in enumerate(settings) for seed in (0, 1)]
    put(tmp_path, "staleness", rows)
    titles, _, first, second = science.table_of("staleness")
    assert titles == ("| staleness | seeds | gold reward | minus staleness 0 | KL to start | ESS, completions |")
    assert first.startswith("| 0 | 2 | 0.500 [")
    assert first.endswith("] |  | 0.50 [0.50, 0.50] | 0.750 |")
    assert "| +0.100 [" in second


def test_sums_that_are_new_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "DATA", tmp_path)
    rows = [("new", "", 0, "0011"), ("dpo", "1", 0, "1110"), ("dpo", "1", 1, "1100")]
    put(
        tmp_path,
        "sums",
        [
            {"setting": {"algorithm": name, "train.staleness": age}, "seed": seed, "kl": 0.0, "scores": scores}
            for name, age, seed, scores in rows
        ],
    )
    *_, row = science.sums()
    assert [cell.split(" [")[0] for cell in row.split(" | ")] == ["| dpo", "1", "2", "62.5%", "25.0%"]


def test_a_certificates_runs_are_kept_in_the_order_of_their_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(science, "DATA", tmp_path)
    for seed in (10, 2):
        for age in ("1", "0"):
            results = {"setting": {"staleness": age}, "seed": seed, "kl": {"estimate": 0.5}, "scores": [1.0, 0.0]}
            folder = tmp_path / "certificate" / "runs" / f"staleness={age},seed={seed}"
            folder.mkdir(parents=True)
            text = json.dumps({"results": results | {"metrics": {"val/ess_sequence": 1.0}}})
            (folder / "trial.json").write_text(text)
    science.keep("certificate", tmp_path / "certificate")
    kept = [(run.seed, run.setting["staleness"], run.scores) for run in science.read("certificate")]
    assert kept == [(seed, age, (1.0, 0.0)) for seed in (2, 10) for age in ("0", "1")]
