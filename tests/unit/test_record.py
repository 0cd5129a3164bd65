"""What a run's folder says about how it came to be, for runs from Python as for those by the command."""

from __future__ import annotations

import json
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tiny import count_letters, new_args
from transformers import TrainerCallback

from async_rlhf import OnlineDPOTrainer, RLOOTrainer
from async_rlhf.config import ConfigError, GenerationConfig
from async_rlhf.config.episodes import World
from async_rlhf.config.parsing import parse
from async_rlhf.models.gpu_defaults import decided
from async_rlhf.models.saving import write_model
from async_rlhf.rewards.functions import load_reward_functions
from async_rlhf.run.callbacks import TRACKERS, training_arguments
from async_rlhf.run.card import Card
from async_rlhf.run.config import RunConfig
from async_rlhf.run.inputs import Inputs
from async_rlhf.run.record import (
    ENVIRONMENT,
    RUN_FILE,
    Record,
    first_time,
    of_command,
    of_python,
    starts_of,
    without_secret_words,
)
from async_rlhf.system.versions import checkout_of, code


class Nothing(TrainerCallback):
    """A callback that can be named."""


def test_a_run_from_python_has_run_yml_and_what_was_an_object_is_said(make_policy, tokenizer, prompts, tmp_path):
    write_model(make_policy(), tokenizer, tmp_path / "model")
    (tmp_path / "gold.py").write_text(
        "def gold(prompts, completions, **c):\n    return [1.0 * len(x) for x in completions]\n"
    )
    (gold,) = load_reward_functions([f"{tmp_path / 'gold.py'}:gold"])
    args = new_args(tmp_path, total_episodes=8, algorithm="rloo", learning_rate=2e-4)
    known = {"reward_funcs": [gold, lambda prompts, completions, **c: [0.0] * len(completions)], "callbacks": [Nothing]}
    RLOOTrainer(str(tmp_path / "model"), args, prompts, **known).train()
    path = Path(args.output_dir) / RUN_FILE
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    comment = [line for line in text.splitlines() if line.startswith("#   ")]
    assert comment[0].startswith("#   reward_funcs: test_record:test_a_run_from_python")
    assert comment[1:] == ["#   data.train: 20 rows"]
    found = yaml.safe_load(text)
    assert (found["algorithm"], found["model"]) == ("rloo", str(tmp_path / "model"))
    assert (found["reward_funcs"][0], found["callbacks"]) == (f"{tmp_path / 'gold.py'}:gold", ["test_record:Nothing"])
    with pytest.raises(ConfigError, match=r"data\.train"):
        parse(RunConfig, "train", ["--config", str(path)])
    words = ["--config", str(path), "--data.train", "rows.jsonl", "--reward_funcs", f'["{tmp_path / "gold.py"}:gold"]']
    # What a GPU would decide is said as it was decided here, so that the run can be repeated on one.
    assert parse(RunConfig, "train", words)[0].train == decided(args, has_bf16=False, packs=False)


def test_a_folder_that_is_used_again_is_not_logged_in_the_earlier_runs_trackers(
    make_policy, tokenizer, prompts, make_args
):
    args = make_args(total_episodes=8)
    path = Path(args.output_dir) / TRACKERS
    path.parent.mkdir()
    path.write_text('{"tensorboard": {"folder": "runs/old"}}')
    OnlineDPOTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
    assert not path.exists()


def test_every_start_is_noted_with_code_and_commit(make_policy, tokenizer, prompts, make_args):
    def train(**changes):
        args = make_args(save_steps=1, **changes)
        known = {"reward_funcs": count_letters, "processing_class": tokenizer}
        OnlineDPOTrainer(make_policy(), args, prompts, **known).train()
        return json.loads((Path(args.output_dir) / ENVIRONMENT).read_text())

    (first,) = train(total_episodes=8)
    assert first["async_rlhf"] == code()
    assert {"torch", "transformers"} <= first["packages"].keys()
    assert first["started"].endswith("+00:00")
    again = train(total_episodes=16, resume=True)
    assert again[0] == first
    assert len(again) == 2
    assert len(train(total_episodes=8, overwrite_output_dir=True)) == 1


def test_files_of_the_same_names_that_no_run_has_written_are_left_alone(make_policy, tokenizer, prompts, make_args):
    args = make_args(total_episodes=8)
    folder = Path(args.output_dir)
    folder.mkdir()
    texts = {ENVIRONMENT: '{"python": "mine"}', TRACKERS: '{"phones": 1}'}
    for name, text in texts.items():
        (folder / name).write_text(text)
    OnlineDPOTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
    assert {name: (folder / name).read_text() for name in texts} == texts


def test_a_damaged_list_of_starts_is_none(tmp_path):
    file = tmp_path / ENVIRONMENT
    for text in ('["async_rlhf"]', '[["async_rlhf"]]', "[5]", "{}", "[" * 5000, "x"):
        file.write_text(text)
        assert (starts_of(file), first_time(tmp_path)) == (None, None)
    file.write_text('[{"async_rlhf": {}, "chat_time": 5}]')
    assert (starts_of(file), first_time(tmp_path)) == ([{"async_rlhf": {}, "chat_time": 5}], None)


def git(folder: Path, *words: str) -> str:
    known = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *known, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_of_a_checkout_and_whether_it_has_changes(tmp_path):
    assert checkout_of(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert checkout_of(tmp_path) is None  # there is no commit yet
    file, other = tmp_path / "a.py", tmp_path / "installed.py"
    file.write_text("1")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert checkout_of(tmp_path) == checkout_of(file) == {"commit": commit, "dirty": False}
    other.write_text("of a virtual environment")  # git does not know it: the package is not part of this checkout
    assert checkout_of(other) is None
    assert checkout_of(file) == {"commit": commit, "dirty": False}
    file.write_text("2")
    assert checkout_of(file) == {"commit": commit, "dirty": True}


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checkout_of(tmp_path) is None


SECRET = "s3cret"


def test_no_secret_is_in_a_record_or_in_what_trackers_get(make_policy, tmp_path):
    generation = GenerationConfig(
        engine="vllm",
        placement="server",
        urls=[f"http://u:{SECRET}@h"],
        api_key=SECRET,
        response_length=4,
        num_threads=1,
    )
    args = replace(new_args(tmp_path, push_to_hub=True, hub_token=SECRET), generation=generation)
    record = of_python(args, "online_dpo", Inputs(make_policy(), [{"query": "a"}], reward_funcs=[count_letters]))
    names = [f"judge.py:judge(api_key='{SECRET}', limit=3)", "plain.py:f"]
    record = Record({**record.values, "reward_funcs": names}, record.unnamed)
    known = record.flat()
    assert SECRET not in json.dumps(known)
    assert known["reward_funcs"] == ["judge.py:judge(api_key=***, limit=3)", "plain.py:f"]
    assert SECRET not in training_arguments(args, known).to_json_string()
    record = Record({**record.values, "reward_funcs": []}, record.unnamed)
    record.write(tmp_path)
    assert SECRET not in (tmp_path / RUN_FILE).read_text()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--model", "m", "--train.hub_token", "t"], ["--model", "m", "--train.hub_token", "***"]),
        (["--train.generation.api_key=t", "a"], ["--train.generation.api_key=***", "a"]),
        (['--train.vllm.options={"hf_token": "t", "n": 1}'], ['--train.vllm.options={"hf_token": "***", "n": 1}']),
        (["{hf_token: t}", "http://u:t@h/"], ['{"hf_token": "***"}', "http://***@h/"]),
        (["a.py:f(secret='t', n=1)"], ["a.py:f(secret=***, n=1)"]),
    ],
)
def test_a_noted_command_has_no_secrets(words, shown):
    assert without_secret_words(words) == shown


def test_what_is_played_is_in_the_record_and_on_the_card(tmp_path):
    """A run by the command is repeated by that of its card; one from Python says what was an object."""
    words = ["--model=o/m", "--data.train=o/d", "--train.output_dir=out", "--train.generation.max_turns=2"]
    words += ["--train.batches=2"]
    game = f"{tmp_path}/games.py:Game(size=3, password='hidden')"
    for given, said in {
        f"--environment={game}": "--environment 'games.py:Game(size=3, password=***)'",
        f"--agent={tmp_path}/games.py:play": "--agent games.py:play",
        '--tools=["async_rlhf.tasks.tools:calculate"]': """--tools '["async_rlhf.tasks.tools:calculate"]'""",
    }.items():
        judged = ["--reward_funcs=async_rlhf.rewards:length"] if "tools" in given else []
        config, _ = parse(RunConfig, "train", [*words, given, *judged])
        text = Card("a", config.train, of_command(config), None).text({}, {})
        assert said in text
        assert "hidden" not in text
        assert "rewards | a model made in Python" not in text
    assert "| rewards | async_rlhf.rewards:length |" in text

    class Game:
        """Of a test."""

    inputs = Inputs(model="o/m", train_dataset=[{"query": "a"}], world=World(Game))
    record = of_python(config.train, "online_dpo", inputs)
    assert record.unnamed["environment"].endswith("Game")
    text = Card("a", config.train, record, None).text({}, {})
    assert "| rewards | the environment test_record:test_what_is_played" in text
