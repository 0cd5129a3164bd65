"""`async-rlhf explain`: repeats an update of a finished run bit for bit, from whatever checkpoint there is."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import PROMPTS, byte_tokenizer, count_letters, new_args, new_policy

from async_rlhf.cli import main
from async_rlhf.commands.replay import run_replay
from async_rlhf.commands.rerun import ReplayDiffersError
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, ReplayConfig, RunConfig
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.studies.explain.command import run_explain
from async_rlhf.studies.explain.config import ExplainConfig

REWARD = """
def letters(prompts, completions, **columns):
    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]
"""


@pytest.fixture
def train(tmp_path):
    """A finished run of six batches by the command, its folder."""
    write_model(new_policy(), byte_tokenizer(), tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "reward.py").write_text(REWARD)

    def run(name="run", algorithm="online_dpo", **changes) -> Path:
        args = new_args(tmp_path, name, algorithm=algorithm, **changes)
        prompts = str(tmp_path / "prompts.jsonl")
        data = DataConfig(prompts, eval=prompts if changes.get("eval_steps") else None)
        reward = [f"{tmp_path / 'reward.py'}:letters"]
        config = RunConfig(str(tmp_path / "policy"), data, reward_funcs=reward, train=args, algorithm=algorithm)
        run_train(config)
        return Path(args.output_dir)

    return run


def checksums(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def moved(before: Path, after: Path) -> float:
    """How far apart the weights of two checkpoints are."""
    old, new = (load_file(path / "model.safetensors") for path in (before, after))
    assert old.keys() == new.keys()
    return torch.cat([(new[name].double() - old[name].double()).flatten() for name in old]).norm().item()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_update_is_repeated_from_the_checkpoint_before_it(train, staleness):
    run = train(staleness=staleness, save_steps=1, eval_steps=2)
    before = checksums(run)
    found = run_explain(ExplainConfig(str(run), batch=5, top=1))
    assert found["repeated"] == {"from": "checkpoint-4", "batches": 1, "compared": [5]}
    # The weights that the run itself has written say how far this update has moved them.
    assert found["step"]["norm"] == pytest.approx(moved(run / "checkpoint-4", run / "checkpoint-5"), rel=1e-9)
    assert [lag["lag"] for lag in found["lags"]] == [staleness]
    whole = found["step"]["contributions"]
    assert whole["sum_of_units"] == pytest.approx(whole["of_the_whole_batch"], rel=1e-4)
    after = checksums(run)
    assert after.keys() - before.keys() == {"explain/explain-5.json", "explain/explain-5.txt"}
    assert before.items() <= after.items()
    assert json.loads((run / "explain" / "explain-5.json").read_text()) == found
    assert (run / "explain" / "explain-5.txt").read_text().startswith("Batch 5 of ")

    for checkpoint in ("checkpoint-4", "checkpoint-3"):
        shutil.rmtree(run / checkpoint)
    again = run_explain(ExplainConfig(str(run), batch=5, top=1, output_dir=str(run / "farther")))
    assert again["repeated"] == {"from": "checkpoint-2", "batches": 3, "compared": [3, 4, 5]}
    assert {**again, "repeated": None} == {**found, "repeated": None}


@pytest.mark.parametrize("algorithm", ["online_dpo", "ppo"])
def test_without_checkpoints_it_repeats_the_run_from_its_beginning(train, algorithm, caplog):
    caplog.set_level("INFO")
    run = train(algorithm=algorithm, staleness=1)
    found = run_explain(ExplainConfig(str(run), batch=3, top=0))
    assert found["repeated"] == {"from": None, "batches": 3, "compared": [1, 2, 3]}
    assert "no checkpoint before batch 3; repeats 3 batches from the beginning" in caplog.text
    first = run_explain(ExplainConfig(str(run), batch=1, top=0))
    assert first["repeated"]["compared"] == [1]
    assert first["step"]["without_gradient"]["change"] == pytest.approx(1.0)  # nothing is left of earlier batches


def test_a_bounded_run_is_repeated_by_its_schedule_even_if_it_was_cut_off(train):
    generation = {"placement": "process", "workers": 1}
    run = train(staleness=2, staleness_mode="bounded", save_steps=2, generation=generation)
    schedule = run / "schedule.jsonl"
    lines = schedule.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    schedule.write_text("".join(lines[:4]))
    found = run_explain(ExplainConfig(str(run), batch=4, top=1))
    assert found["repeated"] == {"from": "checkpoint-2", "batches": 2, "compared": [3, 4]}
    assert [lag["lag"] for lag in found["lags"]] == [3 - json.loads(lines[3])["versions"][0]]

    schedule.write_text("".join(lines[:3]))
    with pytest.raises(ConfigError, match=r"has no batch 4; must have it"):
        run_explain(ExplainConfig(str(run), batch=4, overwrite=True))


def test_a_run_that_was_uploaded_is_repeated_without_uploads(train):
    run = train(save_steps=2)
    record = yaml.safe_load((run / "run.yml").read_text())
    hub = {"push_to_hub": True, "hub_model_id": "ours/policy", "hub_strategy": "end", "hub_private_repo": True}
    record["train"] |= hub
    (run / "run.yml").write_text(yaml.safe_dump(record))
    assert run_explain(ExplainConfig(str(run), batch=3, top=0))["repeated"]["compared"] == [3]
    run_replay(ReplayConfig(str(run)))
    again = yaml.safe_load((run / "replay" / "run.yml").read_text())["train"]
    assert {key: again.get(key) for key in hub} == {
        "push_to_hub": False,
        "hub_model_id": None,
        "hub_strategy": "every_save",
        "hub_private_repo": None,
    }


def test_a_run_that_logged_something_else_is_an_error_that_names_it(train):
    run = train(save_steps=2)
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    true = lines[3]["loss/policy_avg"]
    lines[3]["loss/policy_avg"] = true + 1e-7
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ReplayDiffersError, match=rf"batch 4: loss/policy_avg is {true!r}, was .* \(1 metrics differ\)"):
        run_explain(ExplainConfig(str(run), batch=4))
    assert not (run / "explain").exists()
    run_explain(ExplainConfig(str(run), batch=6, top=0))  # from checkpoint-4


def test_what_cannot_be_explained_says_why(train, tmp_path, monkeypatch):
    run = train()
    with pytest.raises(ConfigError, match=r"batch: got 7; must be 1 to 6, the last batch that .* has logged"):
        run_explain(ExplainConfig(str(run), batch=7))
    with pytest.raises(ConfigError, match="batch: got 0; must be at least 1"):
        ExplainConfig(str(run), batch=0)
    with pytest.raises(ConfigError, match=r"run: got .*; must be the output folder of a run"):
        run_explain(ExplainConfig(str(tmp_path / "nowhere"), batch=1))
    run_explain(ExplainConfig(str(run), batch=1, top=0))
    with pytest.raises(ConfigError, match=r"output_dir: got .*; has explain-1.json already; set overwrite"):
        run_explain(ExplainConfig(str(run), batch=1, top=0))
    run_explain(ExplainConfig(str(run), batch=1, top=0, overwrite=True))

    starts = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps([starts[0] | {"ranks": 2}]))
    with pytest.raises(ConfigError, match="has a learner on 2 ranks; must be on one"):
        run_explain(ExplainConfig(str(run), batch=1, overwrite=True))

    args = replace(new_args(tmp_path, "python"), total_episodes=8)
    OnlineTrainer(new_policy(), args, PROMPTS, reward_funcs=count_letters, processing_class=byte_tokenizer()).train()
    with pytest.raises(
        ConfigError, match=r"started from Python with objects .*data.train: 20 rows.*cannot be explained"
    ):
        run_explain(ExplainConfig(args.output_dir, batch=1))


def test_the_command_line(train, capsys):
    run = train(algorithm="rloo", save_steps=2)
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(run), "--batch", "3", "--top", "2"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert (run / "explain" / "explain-3.txt").read_text() in shown
    for words in ("repeated: 1 batch from checkpoint-2; the metrics of 1 equal the run's", "letters", "advantage"):
        assert words in shown
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(run), "--batch", "30"])
    assert ended.value.code == 2
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"objective/kl": ', '"objective/kl": 1'))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(run), "--batch", "4"])
    assert ended.value.code == 1
    assert "async-rlhf explain: error: batch 3: objective/kl is" in capsys.readouterr().err
