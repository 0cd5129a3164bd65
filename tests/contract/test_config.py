"""What is said beside a key holds: what may change on resume, what a finished stage compares, what ``--help`` shows."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from tables import each
from test_fuzz import SEEDS
from tiny import new_args

from async_rlhf import OnlineDPOConfig
from async_rlhf.algorithms.table import BUILT_IN, find
from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.commands.train import train_stage
from async_rlhf.config import ConfigError, PairsConfig
from async_rlhf.config.base import Checked, configuration, key, known_of
from async_rlhf.config.parsing import options_of, parse
from async_rlhf.run.checkpoint import ResumeState, as_saved
from async_rlhf.run.config import DataConfig, RunConfig

FILES = {**SEEDS, **{f"train {name}": f"{SEEDS['train']}algorithm: {name}\n" for name in BUILT_IN}}
FILES["config"] = "file: config.yml\n"  # itself
FILES["evaluate"] += "judge: {max_tokens: 16}\nvllm: {options: {}}\n"


def built(kind: type[Any], values: dict[str, Any]) -> Any:
    """The configuration that the values of a file are, made as in Python."""
    hints = get_type_hints(kind)
    if kind is RunConfig:
        hints["train"] = find(values.get("algorithm", "online_dpo")).config
    return kind(**{name: built(hints[name], x) if is_dataclass(hints[name]) else x for name, x in values.items()})


@pytest.mark.quick
@each(FILES)
def test_what_is_parsed_is_what_is_made_in_python_and_can_be_pickled(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yml").write_text(FILES[case])
    command = case.split()[0]
    kind = import_attribute(COMMANDS[command].config)
    parsed, text = parse(kind, command, ["--config", "config.yml"])
    assert parsed == built(kind, yaml.safe_load(FILES[case]))
    assert type(parsed) is kind
    again = pickle.loads(pickle.dumps(parsed))
    assert (again, type(again)) == (parsed, type(parsed))
    Path("config.yml").write_text(text)
    assert parse(kind, command, ["--config", "config.yml"])[0] == parsed


@each(["null", "Null", "NULL", "~"])
def test_null_is_null_in_an_option_and_a_variable(text, monkeypatch):
    monkeypatch.setenv("ASYNC_RLHF_PROMPT_WORDS", text)
    kind = import_attribute(COMMANDS["sft"].config)
    found = parse(kind, "sft", ["--train=a", "--output_dir=b", f"--eval={text}"])[0]
    assert (found.eval, found.prompt_words) == (None, None)


def test_of_variables_for_a_group_and_for_one_in_it_the_inner_one_wins(tmp_path):
    """However sets are ordered, which differs from process to process."""
    program = (
        "from async_rlhf.commands.table import *\nfrom async_rlhf.config.parsing import parse\n"
        "words = ['--model=m', '--data.train=d', '--reward_funcs=a:b']\n"
        "config = parse(import_attribute(COMMANDS['train'].config), 'train', words)[0]\n"
        "print(config.train.generation.vllm.block_size)"
    )
    outer, inner = "{generation: {vllm: {block_size: 8}}}", "{block_size: 16}"
    variables = {"ASYNC_RLHF_TRAIN": outer, "ASYNC_RLHF_TRAIN__GENERATION__VLLM": inner}
    for seed in "1234":
        known = {**os.environ, **variables, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", program], env=known, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "16"


def test_a_configuration_does_not_follow_the_environment_once_it_is_made(monkeypatch):
    """A worker is one of several ranks no more, but its configuration is still that of the run."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    config = OnlineDPOConfig(total_episodes=320)
    sent = pickle.dumps(config)
    monkeypatch.delenv("WORLD_SIZE")
    assert pickle.loads(sent) == config
    assert pickle.loads(sent).batch_size == config.batch_size == 32
    assert OnlineDPOConfig(total_episodes=320).batch_size == 8


def leaves(config: Checked, prefix: str = "") -> list[str]:
    """Every key that is no group, with dots."""
    found = []
    for item in fields(config):
        value = getattr(config, item.name)
        found += leaves(value, f"{prefix}{item.name}.") if isinstance(value, Checked) else [f"{prefix}{item.name}"]
    return found


def with_other(config: Any, name: str) -> Any:
    """The configuration with another value of that key, of its type; whether it goes with the others is not asked."""
    first, _, rest = name.partition(".")
    value = getattr(config, first)
    other = with_other(value, rest) if rest else another(value, get_type_hints(type(config))[first])
    changed = pickle.loads(pickle.dumps(config))
    object.__setattr__(changed, first, other)
    return changed


def another(value: Any, hint: Any) -> Any:
    options = [option for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for option in get_args(kind)]
    if value == "auto" and "bfloat16" in options:
        return "bfloat16"  # "float32" is what it means on a CPU
    for option in options:
        if option != value:
            return option
    kinds = {bool: not value, int: 7, float: 0.25, str: "another", list: ["another"], dict: {"another": 1}}
    plain = [kind for kind in get_args(hint) if kind is not type(None) and get_origin(kind) is not Literal]
    kind = plain[0] if value is None or value in options else type(value)
    other = kinds[get_origin(kind) or kind]
    assert other != value
    return other


def a_run(folder: Path) -> RunConfig:
    return RunConfig("m", DataConfig("d"), reward_funcs=["a:b"], train=new_args(folder))


ONLINE = leaves(new_args(Path()))
LAST_DIGITS = {"device", "reward_model_device", "reference_device", "num_threads", "generation.device"}
LAST_DIGITS |= {"generation.num_threads", "generation.vllm.tensor_parallel_size"}
LONGER_OR_KEPT = {"total_episodes", "save_steps", "save_total_limit", "metric_for_best_model", "greater_is_better"}
SERVED = {"engine": "vllm", "placement": "server", "urls": ["http://a"]}
LONGER_OR_KEPT |= {
    "batches",
    "export_dtype",
    "eval_steps",
    "eval_temperature",
    "eval_samples_per_prompt",
    "eval_on_start",
}
LONGER_OR_KEPT |= {"early_stopping_patience", "num_train_epochs", "reward_timeout", "chat.now", "reward_retries"}
LONGER_OR_KEPT |= {"generation.step_timeout"}


@pytest.mark.quick
@each(ONLINE)
def test_a_run_is_resumed_with_another_key_unless_that_decides_what_is_computed(name, tmp_path):
    """Said here once more for the exceptions alone: they are on purpose."""
    before = new_args(tmp_path, generation=SERVED if name == "generation.urls" else None)
    state, after = ResumeState(0, as_saved(before, "online_dpo"), {}, {}, {}), with_other(before, name)
    elsewhere = known_of(before, name).get("role", "result") != "result" and name not in LAST_DIGITS
    if elsewhere or name in LONGER_OR_KEPT:
        state.check(after, "online_dpo")
        return
    with pytest.raises(ConfigError, match=rf"\n +{name}[.\w]*: was "):
        state.check(after, "online_dpo")


def test_a_key_that_an_older_version_did_not_know_counts_as_its_default(tmp_path):
    before = OnlineDPOConfig(output_dir=str(tmp_path))
    for name in set(ONLINE) - {"output_dir"}:
        saved = as_saved(before, "online_dpo")
        saved.pop(name, None)  # an empty dictionary has no leaf
        ResumeState(0, saved, {}, {}, {}).check(before, "online_dpo")
    saved = as_saved(before, "online_dpo")
    del saved["learning_rate"], saved["generation.top_k"]
    found = r"\n  generation.top_k: was 0, is 5\n  learning_rate: was [^,]*, is 0.5\n"
    after = replace(before, learning_rate=0.5, generation=replace(before.generation, top_k=5))
    with pytest.raises(ConfigError, match=found):
        ResumeState(0, saved, {}, {}, {}).check(after, "online_dpo")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The configuration of a run that has ended, and the folder."""
    folder = tmp_path_factory.mktemp("finished")
    train_stage(config := a_run(folder)).publish_files({}, {"loss": 1.0})
    return config, folder / "run"


@each(leaves(a_run(Path())))
def test_a_finished_run_is_another_one_only_by_a_key_that_decides_the_result(name, finished):
    config, folder = finished
    stage = replace(train_stage(with_other(config, name)), folder=folder)  # another output_dir has another marker
    if known_of(config, name).get("role", "result") != "result":
        redone = name == "train.overwrite_output_dir"
        assert stage.done() == (None if redone else {"loss": 1.0})
        return
    with pytest.raises(ConfigError, match=rf"\n +{name}[.\w]*: was "):
        stage.done()


def test_a_finished_run_of_an_earlier_version_counts(tmp_path):
    """Markers then held keys that are not compared any more."""
    config = a_run(tmp_path)
    stage = train_stage(config)
    stage.publish_files({}, {"loss": 1.0})
    marker = json.loads(stage.marker.read_text())
    marker["config"] |= {"train.generation.timeout": 5.0, "train.output_dir": "elsewhere", "train.ray.num_cpus": 9.0}
    stage.marker.write_text(json.dumps(marker))
    assert train_stage(config).done() == {"loss": 1.0}


def explained(command: str) -> dict[str, str]:
    """Each key of a command, and what ``--help`` says of it."""
    kind = import_attribute(COMMANDS[command].config)
    kinds = [RunConfig.of(name) for name in BUILT_IN] if kind is RunConfig else [kind]
    return {option.key: f"{option.text}{option.more}" for each in kinds for option in options_of(each)}


@each(COMMANDS)
def test_the_help_explains_every_key(command):
    for name, text in explained(command).items():
        assert len(text.partition(" Must be")[0].partition(" [")[0]) > 3, name


def test_the_help_says_rules_and_roles():
    found = explained("train")
    assert found["train.staleness"].endswith("Must be at least 0 and at most 128.")
    assert found["train.generation.timeout"].endswith("Must be above 0. [speed]")
    assert found["train.total_episodes"].endswith("[may change on resume: the run becomes longer]")
    assert found["train.num_threads"].endswith("[speed] [must stay on resume: the last digits of sums depend on it]")
    assert found["data.train"].startswith("A .jsonl, .json, .parquet or .csv file")
    assert found["train.vf_coef"].startswith("Weight of the value loss.")  # of PPO alone


def test_rules_are_kept_where_a_key_stands():
    with pytest.raises(ConfigError, match=r"samples_per_prompt: got 1; must be at least 2"):
        PairsConfig("m", "p", "o", samples_per_prompt=1, reward_model="r")
    item = key([1])
    assert (item.default, item.default_factory()) == (MISSING, [1])
    assert item.default_factory() is not item.default_factory()


@configuration
class Sampler(Checked):
    """A command."""

    share: float = key(0.5, gt=0, lt=1, why="a share", role="speed", main="sampling")
    """Of the samples."""


@configuration
class OtherSampler(Sampler):
    """One with another default, and one with other bounds, too."""

    share = key(0.25)


@configuration
class WholeSampler(OtherSampler):
    """One that may take all."""

    share = key(1.0, gt=0, le=1)
    """Of all samples."""


def test_another_default_keeps_what_is_said_of_a_key():
    (option,) = options_of(OtherSampler)
    assert (option.default, option.known["main"]) == (0.25, "sampling")
    assert option.text + option.more == "Of the samples. Must be above 0 and below 1. [speed]"
    assert OtherSampler() == OtherSampler(0.25) != OtherSampler(0.5)
    with pytest.raises(ConfigError, match=r"share: got 1\.0; must be below 1: a share"):
        OtherSampler(1.0)
    with pytest.raises(ConfigError, match=r"share: got 'all'; must be a finite number"):
        OtherSampler("all")
    (option,) = options_of(WholeSampler)
    assert option.text + option.more == "Of all samples. Must be above 0 and at most 1. [speed]"
    assert WholeSampler().share == 1
    with pytest.raises(ConfigError, match=r"share: got 1\.5; must be at most 1"):
        WholeSampler(1.5)
