"""Every recipe is read, and runs: two real batches (or stages) on a tiny model and rows of the format that it names.

Only sizes, paths and the engine are changed. What is made by one recipe is read by the next, as a user would.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import runpy
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from forked import be_script, start_forked
from safetensors.torch import load_file
from tiny import PROMPTS, byte_tokenizer, json_rows, new_args, new_policy, tiny_config
from transformers import GPTNeoXForCausalLM, GPTNeoXForSequenceClassification

from async_rlhf import OnlineTrainer
from async_rlhf.cli import main
from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.relabel import run_relabel
from async_rlhf.commands.reward import run_reward
from async_rlhf.commands.sft import run_sft
from async_rlhf.commands.table import COMMANDS
from async_rlhf.commands.train import run_train
from async_rlhf.config import EvaluateConfig, RelabelConfig, RewardConfig, SFTConfig
from async_rlhf.config.parsing import parse
from async_rlhf.rewards.functions import load_reward_functions
from async_rlhf.run.config import RunConfig
from async_rlhf.studies.sweep.config import SweepConfig
from async_rlhf.studies.sweep.trials import trials_of

ROOT = Path(__file__).parents[2]
FILES = {str(path.relative_to(ROOT / "recipes")): path for path in sorted(ROOT.glob("recipes/**/*.yml"))}
SWEEPS = [name for name, path in FILES.items() if "grid" in yaml.safe_load(path.read_text("utf-8"))]
TRAIN = [name for name, path in FILES.items() if "algorithm" in yaml.safe_load(path.read_text("utf-8"))]
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LETTERS = [chr(97 + i) * (1 + i % 4) for i in range(10)]


def command_of(name: str) -> str:
    """train, sweep, or what the file or its folder is called."""
    if name in TRAIN:
        return "train"
    if name in SWEEPS:
        return "sweep"
    return next(word for word in (Path(name).stem, Path(name).parts[0]) if word in COMMANDS)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Recipes name files as seen from there."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", FILES)
def test_every_recipe_is_read(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([command_of(name), "--config", str(FILES[name]), "--dry-run"])
    assert end.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", SWEEPS)
def test_every_setting_of_every_sweep_can_be_run(name):
    config = parse(SweepConfig, "sweep", ["--config", str(FILES[name])])[0]
    trials = trials_of(config)
    assert len(trials) >= 12
    # All settings take equally many optimiser steps of 64 completions, but for what T and K change.
    steps = {one.run.train.num_batches * one.run.train.num_mini_batches for one in trials}
    assert len(steps) == 1


def test_recipes_refer_to_files_that_are_there():
    for path in [*ROOT.glob("recipes/**/*"), ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        if path.suffix in (".yml", ".md", ".py", ".sh"):
            for word in path.read_text("utf-8").replace("`", " ").replace("](", " ").split():
                if word.startswith("recipes/") and word.endswith((".yml", ".py", ".sh")) and "*" not in word:
                    assert (ROOT / word).is_file(), f"{path}: {word}"


def test_the_sweep_varies_one_key(tmp_path):
    """The script's commands, as a program in the place of async-rlhf gets them."""
    program = tmp_path / "async-rlhf"
    program.write_text("#!/bin/sh\nprintf '%s\\037' \"$@\"\necho\n")
    program.chmod(0o755)
    command = [ROOT / "recipes/tldr/sweep.sh", "N", "1 64", "online_dpo_1b", "--train.staleness", "0"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line.split("\037")[:-1] for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["train", "evaluate"] * 2
    for line in lines[::2]:
        line.remove("--resume")
    trained = [parse(RunConfig, "train", line[1:])[0] for line in lines[::2]]
    assert [config.train.num_mini_batches for config in trained] == [1, 64]
    assert [config.train.num_batches for config in trained] == [256, 4]
    assert {config.train.staleness for config in trained} == {0}
    judged = [parse(EvaluateConfig, "evaluate", line[1:])[0] for line in lines[1::2]]
    assert [config.run for config in judged] == [config.train.output_dir for config in trained]
    assert {config.models["sft"] for config in judged} == {config.ref_model for config in judged} == {trained[0].model}


def test_wrong_sums_get_a_hint():
    """By the recipe for SmolLM2: one, and less for a sum that needed it."""
    game = runpy.run_path(str(ROOT / "recipes/smollm/sums.py"))["Hints"]()

    async def play(*answers: str) -> list[tuple[str | None, float, bool]]:
        await game.reset({"answer": "56"}, 0)
        found = [await game.step({"content": answer}) for answer in answers]
        assert [one.metrics["right"] for one in found] == [one.reward > 0 for one in found]
        assert [one.metrics["first"] for one in found] == [one.reward == 1 for one in found]
        return [(one.messages[0]["content"] if one.messages else None, one.reward, one.done) for one in found]

    assert asyncio.run(play("56")) == asyncio.run(play("35 + 21 = 56")) == [(None, 1.0, True)]
    assert asyncio.run(play("55", "It is 56.")) == [("Too low.", 0.0, False), (None, 0.6, True)]
    assert asyncio.run(play("56 or 57", "5")) == [("Too high.", 0.0, False), (None, 0.0, True)]
    assert asyncio.run(play("many", "56")) == [("Give a number.", 0.0, False), (None, 0.6, True)]


DATA_OF_RACE = (("train", "train"), ("eval", "held_out"))


@pytest.mark.rare
def test_the_race_of_sums(stand_in, tmp_path, monkeypatch):
    """As it stands, but for sizes, paths and the model: what each run adds, and the picture of it."""
    run_script("smollm/sums.py", "--largest", 6, "--held_out", 10, "--out", tmp_path / "sums")
    files = [(tmp_path / "sums" / name).read_text().splitlines() for name in ("train.jsonl", "held_out.jsonl")]
    assert list(map(len, files)) == [26, 10]
    assert len({line for file in files for line in file}) == 36
    sizes = {"batches": 2, "eval_steps": 2, "completions_per_batch": 16, "per_device_train_batch_size": 8}
    changes = {f"train.{name}": value for name, value in {**sizes, "report": "false", "num_threads": 1}.items()}
    changes |= {"model": stand_in / "policy", "train.bf16": "false", "train.generation.dtype": "float32"}
    changes |= {
        "train.non_eos_penalty": "false",
        "reward_funcs": f"[{ROOT}/tests/tiny.py:count_letters]",
    }  # it learns, untaught
    changes |= {f"data.{name}": tmp_path / f"sums/{file}.jsonl" for name, file in DATA_OF_RACE}
    words = [str(word) for name, value in changes.items() for word in (f"--{name}", value)]
    results, where = tmp_path / "new/results.jsonl", ["--results", tmp_path / "new/results.jsonl", "--folder", tmp_path]
    for _ in range(2):
        run_script("smollm/race.py", "run", "sums", "--staleness", 0, "--seeds", 0, 1, *where, "--options", *words)
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(run["task"], run["way"], run["seed"]) for run in runs] == [("sums", "S = 0", 0), ("sums", "S = 0", 1)]
    for run in runs:
        assert len(run["scores"]) == 2
        assert 0 < run["seconds"][0] < run["seconds"][1]
        assert len(run["right"]) == 10
        # Of four answers to each question.
        assert {4 * share % 1 for share in run["right"]} == {0}
    answers = json_rows(tmp_path / "sums,0,0" / "eval_samples.jsonl")
    shares = [sum(one["score"] > 0.5 for one in answers if one["row"] == row) / 4 for row in range(10)]
    assert (len(answers), runs[0]["right"]) == (40, shares)
    run_script("smollm/race.py", "draw", *where, "--output", tmp_path / "race.png")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    means = runpy.run_path(str(ROOT / "recipes/smollm/race.py"))["together"]
    assert means([0.0, 0.5, 1.0, 1.0, 0.0, 0.25, 0.75]) == [0.5, 0.5]


# Stand-ins


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory) -> Path:
    """A folder with tiny models, and rows in the format of each data set that a recipe names."""
    folder = tmp_path_factory.mktemp("stand_in")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = tiny_config(hidden_size=16, num_hidden_layers=1, intermediate_size=16, max_position_embeddings=2048)
    torch.manual_seed(0)
    for name, kind in [("policy", GPTNeoXForCausalLM), ("judge", GPTNeoXForSequenceClassification)]:
        config.num_labels = 1
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    summaries = [(f"POST: {text}\nTL;DR:", f" about {text}") for text in LETTERS]
    write(
        folder / "tldr",
        [{"query": q, "reference_response": r, "query_reference_response": q + r} for q, r in summaries],
    )
    write(folder / "preferences", [{"prompt": q, "chosen": r, "rejected": " no"} for q, r in summaries])
    write(
        folder / "gsm8k_hub",
        [
            {"question": f"What is {i} + 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
            for i in range(10)
        ],
    )
    chats = [[{"role": "user", "content": f"Say {t}"}, {"role": "assistant", "content": t}] for t in LETTERS]
    write(
        folder / "no_robots",
        [
            {"prompt": c[0]["content"], "prompt_id": str(i), "messages": c, "category": "Chat"}
            for i, c in enumerate(chats)
        ],
    )
    functions = [{"query": f'def get_{t}(self):\n    """', "name": f"get_{t}"} for t in LETTERS]
    write(folder / "docstrings", functions, ("rl", "heldout"))
    run_script("gsm8k/make_data.py", "--source", folder / "gsm8k_hub", "--output_dir", folder / "gsm8k")
    run_script("smollm/docstrings.py", "--data", folder / "docstrings")
    return folder


def write(
    folder: Path, rows: list[dict[str, object]], splits: tuple[str, ...] = ("train", "validation", "test")
) -> None:
    folder.mkdir()
    for split in splits:
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_script(name: str, *words: object) -> None:
    """A recipe's script, as from the command line."""
    before, sys.argv = sys.argv, [name, *map(str, words)]
    try:
        runpy.run_path(str(ROOT / "recipes" / name), run_name="__main__")
    finally:
        sys.argv = before


def data_of(name: str, folder: Path) -> tuple[Path, Path]:
    """What stands in for a recipe's training and held-out prompts."""
    place = Path(name).parts[0]
    if place == "tldr":
        return folder / "tldr", folder / "tldr"
    if place == "no_robots":
        return folder / "no_robots", folder / "no_robots"
    if place == "gsm8k":
        return folder / "gsm8k/train.jsonl", folder / "gsm8k/test.jsonl"
    if name == "science/sorting.yml":
        run_script("science/make_sorting.py", "--sizes", 10, 10, 10, "--output", folder / "sorting")
        return folder / "sorting/rl.jsonl", folder / "sorting/heldout.jsonl"
    if place == "episodes":
        task = Path(name).stem.partition("_")[0]
        task = "guess" if task == "sft" else task
        made = folder / task
        run_script(f"episodes/{task}.py", made, 40)
        files = ("demonstrations", "demonstrations") if name.endswith("sft.yml") else ("prompts", "held_out")
        return made / f"{files[0]}.jsonl", made / f"{files[1]}.jsonl"
    if place == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="needs the extra reasoning-gym: pip install '.[reasoning-gym]'")
        files = folder / "gym_train.jsonl", folder / "gym_eval.jsonl"
        for seed, file in enumerate(files):
            run_script(
                "reasoning_gym/make_data.py", "--task", "leg_counting", "--size", 10, "--seed", seed, "--output", file
            )
        return files
    if name.startswith("smollm/sums"):
        run_script("smollm/sums.py", "--largest", 6, "--held_out", 10, "--out", folder / "smollm/sums")
        return folder / "smollm/sums/train.jsonl", folder / "smollm/sums/held_out.jsonl"
    ending = "_chat.jsonl" if place == "smollm" else ".jsonl"
    return folder / f"docstrings/rl{ending}", folder / f"docstrings/heldout{ending}"


def small_run(name: str, folder: Path, output: Path) -> RunConfig:
    """A recipe with other sizes, paths and engine: two batches of four prompts."""
    asked = yaml.safe_load(FILES[name].read_text("utf-8"))
    train, heldout = data_of(name, folder)
    changes = {
        "model": folder / "policy",
        "data.train": train,
        "data.eval": heldout if "eval" in asked["data"] else None,
        "train.output_dir": output,
        "train.total_episodes": 8,
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "train.staleness": 0,
        "train.launch": "local",
        "train.eval_steps": 0,
        "train.non_eos_penalty": "false",  # a random model seldom ends within six tokens, and ties teach nothing
        "train.save_steps": 1,
        "train.device": "cpu",
        "train.num_threads": 1,
        "train.progress": "false",
        "train.generation.engine": "transformers",
        "train.generation.placement": "inline",
        "train.generation.workers": 1,
        "train.generation.response_length": 6,
        "train.generation.vllm": "{}",
        "train.parallel.ranks": 1,
        "train.parallel.strategy": "auto",
    }
    if "reward_model" in asked:
        changes["reward_model"] = folder / "judge"
    for size in {"completions_per_batch", "batches"} & asked["train"].keys():
        changes[f"train.{size}"] = None
    if "ray" in asked["train"]:
        changes["train.ray"] = json.dumps(
            {"num_cpus": 1.0, "labels": {}, "reward_workers": 0, "reward_num_cpus": 1.0, "reward_labels": {}}
        )
    words = [f"--{key}={'null' if value is None else value}" for key, value in changes.items()]
    return parse(RunConfig, "train", ["--config", str(FILES[name]), *words])[0]


@pytest.mark.parametrize("name", TRAIN)
def test_every_training_recipe_trains(name, stand_in, tmp_path):
    config = small_run(name, stand_in, tmp_path / "run")
    results = run_train(config)
    logged = json_rows(tmp_path / "run/metrics.jsonl")
    batches = [line for line in logged if "objective/scores" in line]
    assert len(batches) == 2
    judged = [function.split(":")[1] for function in config.reward_funcs] or ["model"]
    parts = ["episode/reward"] if config.environment is not None else [f"reward/{part}" for part in judged]
    assert all(math.isfinite(line[part]) for line in batches for part in parts)
    assert math.isfinite(results["eval_objective/scores" if config.data.eval else "objective/scores"])
    if config.reward_model is not None:  # its scores differ; functions may give a random model 0 for everything
        assert all(math.isfinite(line["loss/policy_avg"]) for line in batches)
        before, after = (load_file(f / "model.safetensors") for f in (stand_in / "policy", tmp_path / "run/final"))
        assert any(not torch.equal(before[key], after[key]) for key in before)


def stage(kind: type, name: str, **changes: object) -> dict:
    """A recipe of a stage with other sizes and paths, done."""
    functions = {SFTConfig: run_sft, RewardConfig: run_reward, RelabelConfig: run_relabel, EvaluateConfig: run_evaluate}
    words = [f"--{key}={'null' if value is None else value}" for key, value in changes.items()]
    return functions[kind](parse(kind, command_of(name), ["--config", str(FILES[name]), *words])[0])


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("sft.yml")])
def test_every_supervised_recipe_trains(name, stand_in, tmp_path, monkeypatch):
    train, heldout = data_of(name, stand_in)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "eval_steps": 1}
    recipe = yaml.safe_load(FILES[name].read_text("utf-8"))
    recipe.pop("new_model", None)  # a model is given in its place
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setitem(FILES, name, tmp_path / "recipe.yml")
    results = stage(
        SFTConfig, name, model=stand_in / "policy", train=train, eval=heldout, output_dir=tmp_path / "sft", **sizes
    )
    assert math.isfinite(results["eval_loss"]), results
    before, after = (load_file(f / "model.safetensors") for f in (stand_in / "policy", tmp_path / "sft"))
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_the_tldr_pipeline(stand_in, tmp_path):
    """Relabelled pairs train a reward model; that trains a policy, which is evaluated."""
    judge, policy, pairs, sizes = stand_in / "judge", stand_in / "policy", tmp_path / "pairs", {"device": "cpu"}
    found = stage(
        RelabelConfig,
        "tldr/relabel.yml",
        data=stand_in / "preferences",
        output_dir=pairs,
        reward_model=judge,
        reward_tokenizer=policy,
        **sizes,
    )
    assert {split: counts["pairs"] for split, counts in found.items()} == {"train": 10, "validation": 10}
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "eval_steps": 1}
    data = {"train": pairs, "eval": pairs, "reference": stand_in / "tldr", "output_dir": tmp_path / "reward"}
    results = stage(RewardConfig, "tldr/reward.yml", model=policy, **data, **sizes)
    assert 0 <= results["eval_accuracy"] <= 1, results
    config = small_run("tldr/online_dpo_410m.yml", stand_in, tmp_path / "run")
    run_train(replace(config, reward_model=str(tmp_path / "reward")))
    places = {"run": tmp_path / "run", "data": stand_in / "tldr", "output_dir": tmp_path / "evaluation"}
    models = {"models": json.dumps({"sft": str(policy)}), "ref_model": policy}
    models |= {"reward_model": judge, "reward_tokenizer": policy}
    sizes = {"engine": "transformers", "response_length": 6, "device": "cpu", "dtype": "float32"}
    results = stage(EvaluateConfig, "tldr/evaluate.yml", **places, **models, **sizes)
    assert {"sft", "final"} <= results["models"].keys(), results
    data = {"data": stand_in / "no_robots", "models": models["models"], "run": places["run"]}
    judges = {
        "judge.url": None,
        "judge.model": "",
        "reward_funcs": "async_rlhf.rewards:length",
        "max_prompt_length": 512,
    }
    results = stage(EvaluateConfig, "no_robots/evaluate.yml", output_dir=tmp_path / "chats", **data, **judges, **sizes)
    assert {"sft", "final"} <= results["models"].keys(), results


@pytest.mark.parametrize("section", ["An environment", "Tools", "An agent"])
def test_the_examples_of_the_page_on_episodes(section, stand_in, tmp_path, monkeypatch):
    """As they are written, on a model that knows nothing; that with another library's client is left out."""
    page = (ROOT / "docs/episodes.md").read_text("utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "openai" not in block]
    (tmp_path / "example.py").write_text("\n\n".join(blocks))
    for task in ("guess", "sums"):
        (tmp_path / "runs" / task).mkdir(parents=True)
        (tmp_path / "runs" / task / "sft").symlink_to(stand_in / "policy")
    monkeypatch.chdir(tmp_path)
    process = start_forked(be_script, tmp_path / "example.py", log=tmp_path / "log")
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    line = (tmp_path / "runs/mine/metrics.jsonl").read_text("utf-8").splitlines()[-1]
    assert json.loads(line)["episode/turns"] >= 1


PEOPLE = "recipes/feedback/people.py"


def test_a_person_gives_the_rewards_of_a_batch(tmp_path):
    """More stars for more letters; a run that is repeated asks nobody, and without answers prompts are left out."""
    folder, shown = tmp_path / "people", []
    ended = threading.Event()

    def answers() -> None:
        while not ended.wait(0.02):
            for file in folder.glob("*.json"):
                row = json.loads(file.read_text())
                if row["stars"] is None:
                    shown.append(file.name)
                    file.write_text(json.dumps({**row, "stars": 1 + min(4, sum(map(str.isalpha, row["completion"])))}))

    def train(name: str, options: str = "", seed: int = 0, **changes) -> tuple[list[dict], dict]:
        rewards = load_reward_functions([f"{PEOPLE}:people(folder={str(folder)!r}, every=0.02{options})"])
        args = new_args(tmp_path, name, total_episodes=8, seed=seed, num_samples_logged=100, **changes)
        OnlineTrainer(new_policy(), args, PROMPTS, reward_funcs=rewards, processing_class=byte_tokenizer()).train()
        return json_rows(tmp_path / name / "samples.jsonl"), json_rows(tmp_path / name / "metrics.jsonl")[-1]

    person = threading.Thread(target=answers)
    person.start()
    try:
        samples, metrics = train("asked")
    finally:
        ended.set()
        person.join()
    given = [min(4, sum(map(str.isalpha, row["completion"]))) / 4 for row in samples]
    assert [row["score"] for row in samples] == given
    assert len(set(given)) > 1
    assert metrics["reward/rated"] == pytest.approx(sum(given) / len(given))
    assert train("repeated")[0] == samples
    assert sorted(shown) == sorted(file.name for file in folder.iterdir())  # each once
    unanswered, metrics = train("alone", ", patience=0.1", seed=1, reward_errors="skip")
    assert metrics["reward/skipped"] == len(unanswered)
    assert {row["score"] for row in unanswered} == {None}


def test_a_person_is_asked_in_a_terminal(tmp_path):
    """What is no number of stars is asked again, and what an editor is writing counts as unanswered."""
    people = runpy.run_path(PEOPLE)
    (file,) = people["ask"](tmp_path, ["2 + 2"], ["5\x1b[2J"])
    with subprocess.Popen([sys.executable, PEOPLE, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asks:
        asks.stdin.write(b"7\n2\n")
        asks.stdin.flush()
        while people["stars"](file) is None:
            assert asks.poll() is None
        asks.kill()
        assert asks.stdout.read().count(b"2 + 2\n--\n5?[2J\n") == 2
    file.write_text('{"stars": ')
    assert people["stars"](file) is None
    file.write_text('{"stars": 6}')
    with pytest.raises(TypeError, match=r"json: got 6; stars must be a whole number from 1 to 5"):
        people["stars"](file)
