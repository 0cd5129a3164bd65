"""The example of docs/extend/algorithm.md, taken from the page, as a user would use it; and what is refused."""

from __future__ import annotations

import json
import math
import pickle
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tiny import PROMPTS, count_letters, json_rows
from transformers import AutoModelForCausalLM

from async_rlhf import Algorithm, GRPOConfig, OnlineTrainer
from async_rlhf.algorithms.grpo import grpo_credit
from async_rlhf.algorithms.policy import policy_loss
from async_rlhf.algorithms.table import BUILT_IN, built_in, find
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError
from async_rlhf.config.parsing import parse
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import RunConfig
from async_rlhf.studies.plan.config import WorkloadConfig
from async_rlhf.studies.plan.roofline import batch_of
from async_rlhf.types import Experience, PolicyOutput

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "algorithm.md"
SOURCE = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL).group(1)
CONFIG = {
    "algorithm": "simpo.py:SIMPO",
    "model": "policy",
    "data": {"train": "prompts.jsonl"},
    "reward_funcs": ["reward.py:count_letters"],
    "train": {
        "output_dir": "out",
        "staleness": 1,
        "beta": 3.0,
        "total_episodes": 16,
        "per_device_train_batch_size": 4,
        "samples_per_prompt": 4,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "non_eos_penalty": False,
        "device": "cpu",
        "max_prompt_length": 40,
        "generation": {"response_length": 8, "num_threads": 1},
    },
}
REWARD = """
def count_letters(prompts, completions, **columns):
    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, make_policy, tokenizer) -> Path:
    """A user's folder, the file of the page in it."""
    monkeypatch.chdir(tmp_path)
    Path("simpo.py").write_text(SOURCE)
    Path("reward.py").write_text(REWARD)
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    Path("run.yml").write_text(yaml.safe_dump(CONFIG))
    write_model(make_policy(), tokenizer, tmp_path / "policy")
    return tmp_path


def train(*words: str) -> list[dict[str, float]]:
    run_train(parse(RunConfig, "train", ["--config", "run.yml", *words])[0])
    return json_rows(Path("out/metrics.jsonl"))


def test_it_is_short():
    assert len(SOURCE.splitlines()) < 60


def test_it_trains_from_yaml_and_is_known_by_its_name_on_resume(folder):
    metrics = train()
    assert [row["batch"] for row in metrics] == [1, 2, 3, 4]
    for row in metrics:
        assert "rewards/margins" in row
        assert "objective/kl" not in row  # it needs no reference
    state = json.loads((folder / "out" / "checkpoint-4" / "resume" / "state.json").read_text())
    assert state["config"]["algorithm"] == "simpo"
    Path("elsewhere.py").write_text(SOURCE)  # the same under another path
    metrics = train("--train.total_episodes=24", "--train.resume=true", "--algorithm=elsewhere.py:SIMPO")
    assert [row["batch"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    Path("simpo.py").write_text(SOURCE.replace('Algorithm("simpo"', 'Algorithm("other"'))
    with pytest.raises(ConfigError, match="algorithm: was 'simpo', is 'other'"):
        train("--train.total_episodes=32", "--train.resume=true")


def test_its_keys_are_in_the_help_and_are_checked(folder):
    words = [sys.executable, "-m", "async_rlhf.cli", "train", "--algorithm", "simpo.py:SIMPO", "--help-all"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "--train.margin" in shown
    assert "How far the chosen completion has to be ahead." in " ".join(shown.split())
    assert "--train.cliprange" not in shown
    with pytest.raises(ConfigError, match=r"margin: got -1\.0; must be at least 0"):
        train("--train.margin=-1")
    with pytest.raises(ConfigError, match="cliprange"):
        train("--train.cliprange=0.2")


def test_another_process_reads_its_configuration(folder):
    """As those of a sweep do, which know the file by the algorithm's name alone."""
    config = parse(RunConfig, "train", ["--config", "run.yml"])[0]
    assert pickle.loads(pickle.dumps(config)) == config
    Path("config.pickle").write_bytes(pickle.dumps(config))
    code = "import pickle, pathlib; print(pickle.loads(pathlib.Path('config.pickle').read_bytes()).train.beta)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.stdout == "3.0\n", done.stderr


def test_from_python_it_is_the_same(folder, tokenizer, monkeypatch):
    train()
    simpo = find("simpo.py:SIMPO")
    config = parse(RunConfig, "train", ["--config", "run.yml", "--train.output_dir=python"])[0].train
    assert type(config) is simpo.config
    options = {"reward_funcs": count_letters, "processing_class": tokenizer}
    rows = [*map(dict, PROMPTS)]
    OnlineTrainer("policy", config, rows, algorithm=simpo, **options).train()
    ours, theirs = (AutoModelForCausalLM.from_pretrained(f"{place}/final") for place in ("python", "out"))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(
        ConfigError, match=r"args: got SimPOConfig; must be one of OnlineDPOConfig, .*, or of the record"
    ):
        OnlineTrainer("policy", config, rows, **options)
    with pytest.raises(ConfigError, match="args: got 'GRPOConfig'; must be of type SimPOConfig"):
        OnlineTrainer("policy", GRPOConfig(), rows, algorithm=simpo, **options)


def test_a_plan_knows_how_many_of_its_samples_are_trained_on(folder):
    recipe = parse(RunConfig, "train", ["--config", "run.yml"])[0]
    assert batch_of(WorkloadConfig(response_tokens=5.0), recipe).trained_per_prompt == 2


def test_its_pairs_are_two_rows_of_a_pass(folder, make_policy, tokenizer, prompts, make_args, monkeypatch, caplog):
    """For the planner, for the memory of a learner, and not only in the built-in configurations."""
    recipe = parse(RunConfig, "train", ["--config", "run.yml"])[0]
    simpo = find("simpo.py:SIMPO")
    assert batch_of(WorkloadConfig(response_tokens=5.0), recipe).train_rows == 2 * recipe.train.training_limits.units
    asked = []
    monkeypatch.setattr("async_rlhf.run.inputs.with_sizes", lambda config, *rest: asked.append(rest) or config)
    rows, said = [{"query": f"q{i}"} for i in range(8)], "Algorithm.rows_per_unit of simpo: got 1; must be 2"
    for algorithm in (simpo, replace(simpo, rows_per_unit=1)):
        config = replace(recipe.train, output_dir=f"rows{algorithm.rows_per_unit}", total_episodes=8)
        OnlineTrainer(
            make_policy(), config, rows, reward_funcs=count_letters, processing_class=tokenizer, algorithm=algorithm
        ).train()
        assert caplog.text.count(said) == (algorithm is not simpo)
    assert [rest[4] for rest in asked] == [2, 1]


def test_its_loss_is_its_formula(folder):
    simpo = runpy.run_path("simpo.py")
    torch.manual_seed(0)
    sampled_BT = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 1]], dtype=torch.float64)
    logprobs_BT, zeros_BT = -torch.rand(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    rows = Experience(
        tokens_BT=zeros_BT.long(),
        lengths_B=torch.full((4,), 4),
        sampled_BT=sampled_BT,
        behaviour_logprobs_BT=zeros_BT,
        rewards_BT=zeros_BT,
        scores_B=torch.zeros(4),
        loss_weights_U=torch.tensor([1.0, 0.0], dtype=torch.float64),
        rows_per_unit=2,
    )
    config = simpo["SimPOConfig"](beta=2.5, margin=0.5)
    found = simpo["simpo_loss"](PolicyOutput(logprobs_BT, zeros_BT), rows, config)
    chosen, rejected = logprobs_BT[0, 1:3].mean().item(), logprobs_BT[1, 1].item()
    assert found.loss_sum.item() == pytest.approx(math.log1p(math.exp(0.5 - 2.5 * (chosen - rejected))))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:SIMPO", "algorithm: got 'nowhere.py:SIMPO': there is no file"),
        ("simpo.py:NOTHING", "algorithm: got 'simpo.py:NOTHING'; simpo.py has no RECORD 'NOTHING'"),
        ("simpo.py:SimPOConfig", "algorithm: got 'simpo.py:SimPOConfig', which is <class"),
        ("simpo.py:", "algorithm: got 'simpo.py:'; must be one of online_dpo"),
        ("simpo", "algorithm: got 'simpo'; must be one of online_dpo, .*, or a record of your own"),
        ("taken.py:SIMPO", "algorithm: got 'taken.py:SIMPO'; its record must have another name than 'grpo'"),
        ("wrong.py:SIMPO", "Algorithm.name: got 'Sim PO'; must be lower-case letters"),
        ("loose.py:SIMPO", "Algorithm.config: got .*; must be a class that is derived from OnlineConfig"),
    ],
)
def test_what_is_no_algorithm_is_refused(folder, name, message):
    Path("taken.py").write_text(SOURCE.replace('Algorithm("simpo"', 'Algorithm("grpo"'))
    Path("wrong.py").write_text(SOURCE.replace('Algorithm("simpo"', 'Algorithm("Sim PO"'))
    Path("loose.py").write_text(SOURCE.replace('Algorithm("simpo", SimPOConfig', 'Algorithm("simpo", dict'))
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_every_built_in_algorithm_says_who_it_is():
    for name, algorithm in zip(BUILT_IN, built_in(), strict=True):
        assert algorithm.name == name
        config = algorithm.config()
        assert 1 <= algorithm.rows_per_prompt(config) <= config.samples_per_prompt
        assert algorithm.needs(config).values == (name == "ppo")
    assert Algorithm("mine", GRPOConfig, grpo_credit, policy_loss).needs(GRPOConfig()).reference is False
