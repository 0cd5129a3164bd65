"""``env:`` of a file: which variables it may set, when they are set, and that no secret can be one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import PROMPTS

from async_rlhf.config import ConfigError, SFTConfig
from async_rlhf.config.parsing import parse
from async_rlhf.models.saving import write_model

FILE = {"model": "m", "train": "d", "output_dir": "out"}


def parsed(folder: Path, variables: object, export: bool = True, words: tuple[str, ...] = ()) -> str:
    (folder / "sft.yml").write_text(yaml.safe_dump(FILE | {"env": variables}))
    return parse(SFTConfig, "sft", ["--config", str(folder / "sft.yml"), *words], export=export)[1]


def test_a_file_sets_what_the_environment_does_not_have(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "x")  # so that it is what it was, after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_PROJECT", "of the shell")
    values = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": 1, "TOKENIZERS_PARALLELISM": False, "WANDB_PROJECT": "mine"}
    parsed(tmp_path, values, export=False)
    assert "WANDB_MODE" not in os.environ
    text = parsed(tmp_path, values)
    found = {name: os.environ[name] for name in values}
    assert found == {
        "WANDB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_PROJECT": "of the shell",
    }
    assert "env" not in yaml.safe_load(text)
    parsed(tmp_path, {}, words=("--env", '{"CUDA_VISIBLE_DEVICES": "1,2"}'))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"LD_PRELOAD": "x.so"}, "env: got 'LD_PRELOAD'; a file may set only WANDB_*, HF_*, TOKENIZERS_*"),
        ({"PYTHONPATH": "x"}, "env: got 'PYTHONPATH'; a file may set only"),
        ({"XHF_HOME": "x"}, "env: got 'XHF_HOME'; a file may set only"),
        ({"HF_TOKEN": "t0ken"}, "env: got 'HF_TOKEN'; is a secret, which no file may hold"),
        ({"WANDB_API_KEY": "t0ken"}, "env: got 'WANDB_API_KEY'; is a secret"),
        ({"HF_ENDPOINT": "t0ken"}, "env: got 'HF_ENDPOINT'; says which server gets keys and data"),
        ({"WANDB_BASE_URL": "t0ken"}, "env: got 'WANDB_BASE_URL'; says which server"),
        ({"WANDB_NOTES": "two\nlines"}, "env.WANDB_NOTES: got 'two\\nlines'; must be text on one line"),
        ({"WANDB_TAGS": ["a"]}, "env.WANDB_TAGS: got ['a']; must be text"),
        ([1], "env: got [1]; must be names of variables and their values"),
    ],
)
def test_what_a_file_may_not_set_is_named_and_no_secret_is_shown(tmp_path, variables, error):
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=re.escape(error)) as caught:
        parsed(tmp_path, variables)
    assert "t0ken" not in str(caught.value)
    assert os.environ == before


def test_it_is_set_before_torch_is_loaded_and_reaches_the_run(tmp_path, make_policy, tokenizer):
    """The run's own reward sees the variable, and so does a module that torch's import would load."""
    write_model(make_policy(), tokenizer, tmp_path / "model")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    (tmp_path / "reward.py").write_text(
        "import os\n"
        "def reward(prompts, completions, **columns):\n"
        "    assert os.environ['HF_X_SEEN'] == 'yes'\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    train = {"output_dir": str(tmp_path / "out"), "total_episodes": 8, "max_prompt_length": 32, "staleness": 0}
    train |= {"non_eos_penalty": False}
    generation = {"response_length": 4}
    values = {
        "model": str(tmp_path / "model"),
        "data": {"train": str(tmp_path / "data.jsonl")},
        "reward_funcs": [f"{tmp_path / 'reward.py'}:reward"],
        "train": train | {"generation": generation},
        "env": {"HF_X_SEEN": "yes"},
    }
    (tmp_path / "run.yml").write_text(yaml.safe_dump(values))
    program = (
        "import os, sys\n"
        "class Watcher:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print('torch sees', os.environ.get('HF_X_SEEN'))\n"
        "sys.meta_path.insert(0, Watcher())\n"
        "from async_rlhf.cli import main\n"
        f"main(['train', '--config', {str(tmp_path / 'run.yml')!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch sees yes" in done.stdout
