"""The tables of the page on science are those of its data."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

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


def test_every_run_of_smollm_is_whole():
    files = ("smollm.jsonl", "smollm_seconds.jsonl")
    for runs in ([*map(json.loads, (science.DATA / file).read_text().splitlines())] for file in files):
        whole(runs)


def whole(runs: list[dict]) -> None:
    assert len({(run["task"], run["way"], run["seed"]) for run in runs}) == len(runs)
    for run in runs:
        assert len(run["seconds"]) == len(run["scores"])
        assert run["seconds"] == sorted(run["seconds"])
    asked = {(run["task"], len(run["right"])) for run in runs if "right" in run}
    assert asked <= {("sums", 400), ("sums_dpo", 400), ("sums_hints", 400)}


def branch(seed: int, first: int, changes: list[float]) -> dict:
    right = {str(first + later): x for later, x in zip((0, 1, 2, 4, 8, 16), changes, strict=True)}
    return {"objective": "o", "seed": seed, "kind": "branch", "first": first, "count": 1, "age": 4, "right": right}


def test_only_the_end_of_a_whole_run_is_kept():
    whole = {"kind": "base", "seed": 0, "right": {"1": 0.1, "2": 0.2}}
    assert science.compact(whole)["right"] == {"2": 0.2}
    one = branch(0, 3, [0.0] * 6)
    assert science.compact(one) == one


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
