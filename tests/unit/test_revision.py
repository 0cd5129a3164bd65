"""owner/model@revision: every load by name takes that revision, from a cache as the hub's own client keeps it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_rlhf.commands.serve import arguments
from async_rlhf.commands.stage import fingerprint
from async_rlhf.config import ConfigError, ServeConfig
from async_rlhf.models.loading import load_policy, with_revision
from async_rlhf.models.saving import write_model

PROGRAM = """
import json, sys
from async_rlhf.config import ConfigError
from async_rlhf.models.loading import load_policy, load_reward_model, load_tokenizer
def total(model):
    return sum(p.double().sum().item() for p in model.parameters())
def error(load, *args, **kw):
    try:
        load(*args, **kw)
    except ConfigError as e:
        return str(e)
name = "org/policy"
print(json.dumps({
    "main": total(load_policy(name)),
    "main by name": total(load_policy(f"{name}@main")),
    "branch": total(load_policy(f"{name}@step1")),
    "commit": total(load_policy(f"{name}@{'b' * 40}")),
    "tokenizer": len(load_tokenizer(f"{name}@step1")),
    "reward": total(load_reward_model("org/judge@step1")),
    "unknown": error(load_policy, f"{name}@step2", key="ref_model"),
}))
"""


def put(cache: Path, name: str, branch: str, commit: str, write) -> None:
    """A snapshot of a repository as huggingface_hub keeps it."""
    place = cache / f"models--{name.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / branch).write_text(commit)
    write(place / "snapshots" / commit)


def total(model) -> float:
    return sum(parameter.double().sum().item() for parameter in model.parameters())


@pytest.mark.rare
def test_models_tokenizers_and_rewards_come_from_the_revision(tmp_path, make_policy, make_reward_model, tokenizer):
    for seed, (branch, commit) in enumerate((("main", "a" * 40), ("step1", "b" * 40))):
        put(tmp_path, "org/policy", branch, commit, lambda to, s=seed: write_model(make_policy(s), tokenizer, to))
        put(tmp_path, "org/judge", branch, commit, lambda to, s=seed: write_model(make_reward_model(s), tokenizer, to))
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    import os

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = total(make_policy(0)), total(make_policy(1))
    assert found["main"] == found["main by name"] == pytest.approx(first)
    assert found["branch"] == found["commit"] == pytest.approx(second)
    assert first != pytest.approx(second)
    assert found["tokenizer"] == 258
    assert found["reward"] == pytest.approx(total(make_reward_model(1)))
    assert "ref_model" in found["unknown"]
    assert "org/policy@step2" in found["unknown"]


def test_a_folder_may_have_an_at_in_its_name(tmp_path, make_policy, tokenizer):
    folder = tmp_path / "me@work"
    write_model(make_policy(), tokenizer, folder)
    assert with_revision(str(folder)) == (str(folder), None)
    assert total(load_policy(str(folder))) == pytest.approx(total(make_policy()))


def test_names_and_revisions():
    assert with_revision("org/model") == ("org/model", None)
    assert with_revision("org/model@v1.0") == ("org/model", "v1.0")
    assert fingerprint("org/model@v1.0") != fingerprint("org/model@v1.1")
    with pytest.raises(ConfigError, match="model: got 'org/model@'; must have a branch, a tag or a commit after the @"):
        load_policy("org/model@")
    with pytest.raises(
        ConfigError, match="model: got 'model@v1'; there is no such folder; must be a folder with a model"
    ):
        load_policy("model@v1")
    words = arguments(ServeConfig("org/model@v1", api_key="0123"), has_gpu=True)
    assert words[words.index("--model") + 1] == "org/model"
    assert words[words.index("--revision") + 1] == "v1"
    assert "--revision" not in arguments(ServeConfig("org/model", api_key="0123"), has_gpu=True)
