"""Sweeps: which runs there are, how they are worked off and resumed, and what they show together."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
from tiny import byte_tokenizer, json_rows, new_policy

from async_rlhf.commands.evaluation.statistics import Interval, crossed_mean_interval, mean_interval
from async_rlhf.config import ConfigError
from async_rlhf.config.parsing import parse
from async_rlhf.studies.sweep import command
from async_rlhf.studies.sweep.command import FailedRunsError, run_sweep, share_of
from async_rlhf.studies.sweep.config import SweepConfig
from async_rlhf.studies.sweep.pictures import draw, picture
from async_rlhf.studies.sweep.results import Summary, summaries, table
from async_rlhf.studies.sweep.running import Job, run_jobs
from async_rlhf.studies.sweep.trials import trials_of, unlike

REWARD = f"{tiny.__file__}:count_letters"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    new_policy().save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [{"query": f"def f{i}(x):"} for i in range(24)]
    for name in ("train", "held"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def make_sweep(inputs, tmp_path):
    def make(**changes) -> SweepConfig:
        train = {
            "completions_per_batch": 8,
            "batches": 3,
            "learning_rate": 1e-3,
            "non_eos_penalty": False,
            "save_steps": 0,
            "generation": {"response_length": 8, "placement": "inline"},
        }
        values = {
            "base": {
                "model": str(inputs / "model"),
                "reward_funcs": [REWARD],
                "data": {"train": str(inputs / "train.jsonl")},
                "train": train,
            },
            "held_out": {"data": str(inputs / "held.jsonl"), "reward_funcs": [REWARD], "response_length": 8},
            "output_dir": str(tmp_path / "sweep"),
            "grid": {"train.staleness": [0, 2]},
            "seeds": [0, 1],
            "baseline": {"train.staleness": 0},
            "parallel": 2,
        }
        return SweepConfig(**values | changes)

    return make


def test_a_grid_has_every_combination_and_seed(make_sweep):
    grid = {
        "algorithm": {
            "dpo": {"algorithm": "online_dpo"},
            "ppo": {"algorithm": "ppo", "train.shared_trunk": True, "train.samples_per_prompt": 1},
        },
        "train.staleness": [0, 4],
    }
    found = trials_of(make_sweep(grid=grid, settings=[{"train.learning_rate": 1e-4}], baseline={}))
    assert len(found) == 2 * 2 * 2
    # All settings of a seed before the next seed.
    names = [f"learning_rate=0.0001,algorithm={a},staleness={s}" for a in ("dpo", "ppo") for s in (0, 4)]
    assert [one.name for one in found] == [f"{name},seed={seed}" for seed in (0, 1) for name in names]
    last = found[-1]
    assert (last.run.algorithm, last.run.train.staleness, last.run.train.seed) == ("ppo", 4, 1)
    assert last.run.train.shared_trunk
    assert last.run.train.learning_rate == 1e-4
    assert last.setting == {"train.learning_rate": "0.0001", "algorithm": "ppo", "train.staleness": "4"}
    assert len({one.folder for one in found}) == len(found)


def test_a_sweep_says_in_which_keys_its_settings_differ(make_sweep, monkeypatch, caplog):
    class StopError(Exception):
        """Before anything is run."""

    def stop(*_):
        raise StopError

    monkeypatch.setattr(command, "hold", stop)
    grid = {"a": {"dpo": {"algorithm": "online_dpo"}, "grpo": {"algorithm": "grpo"}}}
    for changes, said in (({}, False), ({"grid": grid, "baseline": {}}, True)):
        caplog.clear()
        with pytest.raises(StopError):
            command.run_sweep(make_sweep(**changes))
        assert ("settings differ in keys that the sweep does not set" in caplog.text) == said
        assert ("train.kl.coef: no such key (dpo); 0.04 (grpo)" in caplog.text) == said


def test_keys_in_which_settings_differ_and_that_none_sets_are_listed(make_sweep, tmp_path):
    """An algorithm of the user's on OnlineConfig against GRPO: another penalty, and a KL term."""
    text = "from async_rlhf.algorithms.reinforce import RLOO\nfrom async_rlhf.config import OnlineConfig\n"
    text += "from async_rlhf.algorithms.record import Algorithm\n"
    text += 'MINE = Algorithm("mine", OnlineConfig, RLOO.credit, RLOO.loss)\n'
    (tmp_path / "mine.py").write_text(text)
    axis = {"mine": {"algorithm": f"{tmp_path / 'mine.py'}:MINE"}, "grpo": {"algorithm": "grpo"}}
    base = make_sweep().base
    del base["train"]["non_eos_penalty"]
    config = make_sweep(base=base, grid={"a": axis, "train.staleness": [0, 2]}, baseline={})
    found = dict(line.split(": ", 1) for line in unlike(config, trials_of(config)))
    assert found["train.non_eos_penalty"] == "true (mine/0, mine/2); false (grpo/0, grpo/2)"
    assert found["train.kl.coef"] == "no such key (mine/0, mine/2); 0.04 (grpo/0, grpo/2)"
    assert not {"algorithm", "train.staleness", "train.seed", "train.output_dir", "train.batch_size"} & found.keys()
    axis["mine"]["train.non_eos_penalty"] = False
    config = make_sweep(base=base, grid={"a": axis}, baseline={})
    assert "train.non_eos_penalty" not in dict(line.split(": ", 1) for line in unlike(config, trials_of(config)))
    config = make_sweep()
    assert unlike(config, trials_of(config)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"grid": {"train.stalenes": [0]}, "baseline": {}}, r"train.stalenes 0: .*stalenes"),
        ({"grid": {"train.staleness": [0, -1]}}, r"train.staleness -1: staleness: got -1; must be at least 0"),
        ({"grid": {"train.staleness": 4}}, r"grid.train.staleness: got 4; must be a list of values"),
        ({"baseline": {"train.seed": 0}}, r"baseline.train.seed: got 0; must be one of the axes: train.staleness"),
        ({"seeds": [1, 1]}, r"seeds: got \[1, 1\]; must name each once"),
        ({"base": "nowhere.yml"}, r"base: got 'nowhere.yml'; must be a file with the keys of train"),
        ({"held_out": {"data": "x.jsonl"}}, r"held_out: reward_model"),
        ({"held_out": {"models": {}}}, r"held_out.models: got \{\}; must be left out"),
        ({"share": "4/4"}, r'share: got \'4/4\'; must be "i/n"'),
        ({"grid": {"a": {"x": {}, "y": {}}, "a.b": [1]}, "baseline": {}}, r"a x, a.b 1: "),
        (
            {"settings": [{"train.staleness": 1}, {"train.staleness": 1}], "grid": {}, "baseline": {}},
            r"settings: .*same name",
        ),
        ({"grid": {"train.seed": [3, 4]}, "baseline": {}}, r"train.seed: got 3; must be left out: seeds says which"),
        (
            {"grid": {"train.staleness": [0, 1], "A": {"x": {"train.staleness": 5}}}},
            r"train.staleness: got 5; must be set by one axis alone",
        ),
        ({"baseline": {"train.staleness": 3}}, r"baseline.train.staleness: got '3'; must be one of 0, 2"),
        ({"plot_axis": "A"}, r"plot_axis: got 'A'; must be one of the axes: train.staleness"),
        ({"checkpoints": True}, r"base.train.save_steps: got 0; must be above 0 with checkpoints"),
        ({"devices": ["0", "1", "2"]}, r"parallel: got 2; must be as many as devices, which are 3"),
        ({"executor": "ray"}, r"parallel: got 2; must be left out with executor \"ray\""),
        (
            {"held_out": {"data": "x.jsonl", "reward_funcs": [REWARD], "penalties": "training"}},
            r"held_out.penalties: got 'training'; must be left out: the starting model is judged, too",
        ),
        (
            {"held_out": {"data": "x.jsonl", "judge": {"url": "http://localhost:1/v1", "model": "m"}}},
            r"held_out.judge.url: got .*; must be left out: policies are compared by a gold reward",
        ),
    ],
)
def test_what_cannot_be_run_is_named_before_anything_starts(make_sweep, tmp_path, changes, expected):
    with pytest.raises(ConfigError, match=expected):
        run_sweep(make_sweep(**changes))
    assert not (tmp_path / "sweep").exists()


def test_a_missing_model_or_file_is_named_before_anything_starts(make_sweep, tmp_path):
    good = make_sweep()
    with pytest.raises(ConfigError, match=r"base.model: got '/no/model'; there is no such folder"):
        run_sweep(make_sweep(base={**good.base, "model": "/no/model"}))
    base = {**good.base, "train": {**good.base["train"], "seed": 9}}
    with pytest.raises(ConfigError, match=r"base.train.seed: got 9; must be left out: seeds says which"):
        run_sweep(make_sweep(base=base))
    grid = {"data.train": [good.base["data"]["train"], "/no/prompts.jsonl"]}
    with pytest.raises(ConfigError, match=r"base.data.train: got '/no/prompts.jsonl'; there is no such file"):
        run_sweep(make_sweep(grid=grid, baseline={}))
    with pytest.raises(ConfigError, match=r"held_out.data: got '/no/rows.jsonl'; there is no such file"):
        run_sweep(make_sweep(held_out={**good.held_out, "data": "/no/rows.jsonl"}))
    assert not (tmp_path / "sweep").exists()


def test_shares_are_all_runs_once(make_sweep):
    trials = trials_of(make_sweep(seeds=[0, 1, 2]))
    parts = [share_of(trials, f"{i}/4") for i in range(4)]
    assert sorted(one.name for part in parts for one in part) == sorted(one.name for one in trials)


@pytest.mark.rare
def test_a_sweep_runs_judges_resumes_and_compares(make_sweep, tmp_path, capsys):
    config = make_sweep()
    first = run_sweep(config)
    folder = tmp_path / "sweep"
    rows = json_rows(folder / "results.jsonl")
    assert [row["name"] for row in rows] == [f"staleness={s},seed={n}" for s in (0, 2) for n in (0, 1)]
    shown = (folder / "table.md").read_text()
    assert shown in capsys.readouterr().out
    assert "minus staleness 0" in shown
    # Common random numbers: the first batch of each seed is the same, whatever the staleness.
    samples = [
        (folder / "runs" / f"staleness={s},seed={n}" / "train" / "samples.jsonl").read_text().splitlines()[0]
        for s in (0, 2)
        for n in (0, 1)
    ]
    assert samples[0] == samples[2] != samples[1] == samples[3]
    for row in rows:
        assert row["gold"]["estimate"] == pytest.approx(np.mean(row["scores"]))
        assert len(row["scores"]) == 24
    # Done is done, one run that is lost is done again, bit for bit.
    times = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/trial.json")}
    lost = folder / "runs" / "staleness=2,seed=1"
    for path in sorted(lost.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert run_sweep(config)["staleness=2,seed=1"]["scores"] == first["staleness=2,seed=1"]["scores"]
    assert all(path.stat().st_mtime_ns == seen for path, seen in times.items() if lost not in path.parents)
    with pytest.raises(ConfigError, match=r"holds the result of another configuration:\n.*learning_rate"):
        run_sweep(make_sweep(base={**config.base, "train": {**config.base["train"], "learning_rate": 2e-3}}))


@pytest.mark.rare
def test_one_failing_run_is_told_and_the_others_are_done(make_sweep, tmp_path):
    config = make_sweep(grid={"reward_funcs": [[REWARD], ["async_rlhf.rewards:exact_match"]]}, seeds=[0], baseline={})
    with pytest.raises(FailedRunsError, match=r"1 runs failed.*\n  reward_funcs=.*exact_match.*answer"):
        run_sweep(config)
    rows = (tmp_path / "sweep" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row)["setting"]["reward_funcs"] for row in rows] == [json.dumps([REWARD])]


@pytest.mark.parametrize("length", [{"batches": 3}, {"batches": None, "num_train_epochs": 0.5}])
def test_checkpoints_are_judged_and_what_is_not_kept_is_deleted(make_sweep, tmp_path, length):
    config = make_sweep(grid={}, seeds=[0], baseline={}, checkpoints=True, keep="results")
    config.base["train"] = {**config.base["train"], "save_steps": 2, **length}
    results = run_sweep(config)["seed=0"]
    assert list(results["path"]) == ["checkpoint-2"]
    assert results["path"]["checkpoint-2"]["kl"]["estimate"] != results["kl"]["estimate"]
    assert not list(tmp_path.glob("sweep/runs/*/train/**/*.safetensors"))
    assert run_sweep(config)  # it is done all the same


def _wait(seconds: float) -> dict:
    time.sleep(seconds)
    return {"pid": os.getpid()}


def _die(_: object) -> dict:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_killed_process_is_one_failed_job(tmp_path):
    jobs = [Job("dies", _die, None, tmp_path / "a"), Job("lives", _wait, 0.1, tmp_path / "b")]
    found = {one.job.name: one for one in run_jobs(jobs, parallel=1, threads=1)}
    assert found["dies"].results is None
    assert "exit code -9" in found["dies"].error
    assert found["lives"].results is not None


def test_leaving_ends_the_processes_that_are_still_running(tmp_path):
    jobs = [Job("short", _wait, 0.1, tmp_path / "a"), Job("long", _wait, 600.0, tmp_path / "b")]
    outcomes = run_jobs(jobs, parallel=2, threads=1)
    assert next(outcomes).job.name == "short"
    started = time.monotonic()
    outcomes.close()
    assert time.monotonic() - started < 60


def random_effects(chance, seeds, prompts, of_seed, of_prompt, rest):
    effects = of_seed * chance.standard_normal((seeds, 1)) + of_prompt * chance.standard_normal((1, prompts))
    return effects + rest * chance.standard_normal((seeds, prompts))


@pytest.mark.parametrize("seeds", [2, 3, 6])
@pytest.mark.parametrize(
    ("of_seed", "of_prompt", "rest"), [(1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.5, 1.0, 0.5), (0.1, 0.3, 1.0), (0, 0, 1.0)]
)
def test_intervals_over_seeds_and_prompts_cover(of_seed, of_prompt, rest, seeds):
    chance = np.random.default_rng(0)
    draws = [random_effects(chance, seeds, 40, of_seed, of_prompt, rest) for _ in range(1000)]
    covered = np.mean([low <= 0 <= high for _, low, high in map(crossed_mean_interval, draws)])
    assert covered >= 0.935, covered
    if of_seed == 1.0:  # an interval over prompts alone would miss the seeds
        alone = [mean_interval(draw.ravel().tolist()) for draw in draws]
        assert np.mean([low <= 0 <= high for _, low, high in alone]) < 0.5


def test_intervals_of_one_seed_or_one_prompt_are_students():
    values = [0.1, 0.4, 0.35, 0.8]
    assert crossed_mean_interval([values]) == mean_interval(values)
    assert crossed_mean_interval([[x] for x in values]) == mean_interval(values)
    with pytest.raises(ValueError, match="same prompts"):
        crossed_mean_interval([[1.0], [1.0, 2.0]])


def test_the_table_compares_with_the_baseline_seed_by_seed():
    def run(staleness: str, seed: int, scores: list[float]):
        gold = {"estimate": 0.0, "low": 0.0, "high": 0.0}
        setting = {"train.staleness": staleness}
        name = f"{staleness}-{seed}"
        return {"name": name, "setting": setting, "seed": seed, "scores": scores, "kl": gold, "metrics": {}}

    runs = [run("0", 0, [0.0, 1.0]), run("0", 1, [5.0, 6.0]), run("4", 0, [0.5, 1.5]), run("4", 1, [5.5, 6.5])]
    starts = {one["name"]: {"scores": [0.25, 1.25]} for one in runs}
    fresh, stale = summaries(runs, starts, {"train.staleness": "0"})
    assert fresh.against is None
    assert stale.against is not None
    assert stale.against == (0.5, 0.5, 0.5)  # the same for every seed and prompt, though the seeds differ by 5
    assert stale.gold.estimate == 3.5
    assert fresh.wins is not None
    assert fresh.wins.estimate == 0.5
    assert "| 4 | 2 | 3.500 [" in table([fresh, stale], {"train.staleness": "0"})
    (_, partly) = summaries([runs[0], *runs[2:]], starts, {"train.staleness": "0"})  # a run is missing
    assert "(1 of its seeds)" in table([partly], {"train.staleness": "0"})


def test_a_file_of_a_sweep_is_read(tmp_path):
    path = tmp_path / "sweep.yml"
    path.write_text(
        "base: recipes/docstrings/online_dpo.yml\nheld_out: {data: x}\noutput_dir: runs/x\n"
        "grid:\n  train.learning_rate: [1e-4, 3.0e-4]\n  N:\n    '4': {train.num_mini_batches: 4}\nseeds: [0, 1]\n"
    )
    config, _ = parse(SweepConfig, "sweep", ["--config", str(path), "--parallel", "2"])
    assert list(config.grid) == ["train.learning_rate", "N"]
    assert config.parallel == 2


def summary(algorithm: str, rate: str, staleness: str) -> Summary:
    interval = Interval(0.5, 0.4, 0.6)
    setting = {"algorithm": algorithm, "train.learning_rate": rate, "train.staleness": staleness}
    return Summary(setting, (0, 1), interval, interval, None, interval if staleness != "0" else None, 2, {})


def test_the_picture_has_what_was_swept_on_the_horizontal_and_one_look_for_each_series(tmp_path):
    pytest.importorskip("vl_convert")
    found = [summary(a, r, s) for a in ("ppo", "rloo") for r in ("0.1", "0.2") for s in ("64", "0", "4")]
    spec = picture(found, None)
    by_staleness, against, _ = spec["vconcat"][0]["hconcat"]
    x = by_staleness["layer"][0]["encoding"]["x"]
    assert (x["title"], x["scale"]["domain"]) == ("staleness", ["0", "4", "64"])
    looks = by_staleness["layer"][0]["encoding"]["color"]["scale"]
    assert looks["domain"] == [f"{a}, learning_rate {r}" for a in ("ppo", "rloo") for r in ("0.1", "0.2")]
    assert len(set(looks["range"])) == 4
    assert {row["x"] for row in against["data"]["values"]} == {"4", "64"}  # the baseline is not less itself
    other = picture(found, "train.learning_rate")["vconcat"][0]["hconcat"][0]
    assert other["layer"][0]["encoding"]["x"]["scale"]["domain"] == ["0.1", "0.2"]
    words = picture(found, "algorithm")["vconcat"][0]["hconcat"][0]
    assert words["layer"][0]["encoding"]["x"]["scale"]["domain"] == ["ppo", "rloo"]
    assert draw(found, None, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    alike = picture([summary(a, "0.1", s) for a in ("ppo", "rloo") for s in ("0", "4")], None)
    names = {row["series"] for row in alike["vconcat"][0]["hconcat"][0]["data"]["values"]}
    assert names == {"ppo", "rloo"}  # without what all share
    many = [summary(f"own{i}", "0.1", s) for i in range(30) for s in ("0", "4")]
    words = [summary("ppo", "high", "none"), summary("rloo", "high", "none")]
    constant = [summary("ppo", "0.1", "0"), summary("rloo", "0.1", "0")]
    for none in (many, words, constant):  # too many to tell apart, no axis of numbers, none that varies
        assert not draw(none, None, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
