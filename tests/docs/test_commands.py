"""Every command of the pages is run, on inputs that are made here: tiny models, few rows (make docs-check)."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documented import ROOT, Shown, is_run, python, shown
from forked import be_script, start_forked
from rated_sentences import write

from async_rlhf import cli
from async_rlhf.rewards.reasoning_gym import make_rows

pytestmark = [pytest.mark.docs, pytest.mark.timeout(1800)]
COMMANDS = {one.words: one for one in sorted(shown(), key=lambda one: len(one.told)) if is_run(one)}
SOURCES = " ".join(f"--source {name}" for name in ("unittest", "email", "http", "logging", "asyncio"))
SIZES = {
    "recipes/docstrings/": "--train.total_episodes 16 --train.per_device_train_batch_size 4 "
    "--train.gradient_accumulation_steps 2 --train.generation.response_length 8",
    "recipes/episodes/guess_": "--train.batches 2 --train.completions_per_batch 64",
    "recipes/episodes/sums_": "--train.batches 2 --train.completions_per_batch 64",
    "async-rlhf quickstart": f"--scale 0.01 {SOURCES}",
    "async-rlhf data": SOURCES,
    "runs/asynchronous --batch 21": "--batch 7",
    "runs/asynchronous --sample 21/3": "--batch 7 --sample 3",
    "--config recipes/episodes/sft.yml": "--overwrite true --num_epochs 1",
    "second_try.py": "--data.train runs/reasoning_gym/train.jsonl --train.max_prompt_length 200",
    "--from_ratings": "--max_pairs 50",
    "--train.batches 16": "--train.batches 2 --train.save_steps 1",
    "async-rlhf train --model runs/sft --reward_model": "--train.batches 2 --train.completions_per_batch 16 "
    "--train.generation.response_length 8",
    "runs/science/sorting/sft": "--num_epochs 1",
}
"""What makes a command small, by a part of it; it is put behind the page's own options, and so is stronger."""
ELLIPSIS = "--config run.yml"
ORIGINAL = {
    "sft_model_path": "my-org/sft",
    "reward_model_path": "my-org/reward",
    "dataset_name": "my-org/prompts",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 21,
    "total_episodes": 129024,
    "vllm": True,
    "max_grad_norm": 1.0,
    "save_steps": 0.25,
    "hub_strategy": "all_checkpoints",
    "wandb_run_id": "snow",
    "output_dir": "onlinedpo_pythia410m",
}
"""The file that docs/commands/config.md reads."""
SFT = ("my-org/my-sft-model", "my-org/my-base-model")
REWARD = ("my-org/gold", "my-org/my-reward-model")


def run(words: str | list[str], folder: Path, log: Path) -> str:
    """A command of ours in a fork, anything else in a shell; what it printed."""
    words = shlex.split(words) if isinstance(words, str) else words
    words = [str(Path(cli.__file__)), *words[1:]] if words[0] == "async-rlhf" else words[words[0] == "python" :]
    if words[0].endswith(".py") and not {"|", ">"} & set(words):
        os.chdir(folder)
        # Of its own, as a command says less of what is in the cache.
        own = {"PYTHONPATH": f"{folder}:{ROOT}", "ASYNC_RLHF_CACHE": str(folder / "cache")}
        code = start_forked(be_script, folder / words[0], *words[1:], log=log, **own).wait(1800)
    else:
        line = " ".join(word if word in "|>" else shlex.quote(word) for word in words)
        line = f"{sys.executable} {line}" if words[0].endswith(".py") else line
        with log.open("w") as file:
            code = subprocess.call(line, shell=True, cwd=folder, stdout=file, stderr=file)
    said = log.read_text("utf-8")
    # A tiny model's two batches may all tie, so that nothing can be learnt from them.
    assert code == 0 or (code == 3 and "no optimiser step" in said), said
    return said


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """A folder with all that the pages take for granted. Processes of the tests share it."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "place"
    with (folder.parent / "place.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".done").exists():
            folder.mkdir()
            furnish(folder, folder.parent / "place.log")
            (folder / ".done").touch()
    return folder


def furnish(place: Path, log: Path) -> None:
    for name in ("recipes", "scripts", "tests"):
        (place / name).symlink_to(ROOT / name)
    (place / ".venv").symlink_to(sys.prefix)
    run(f"async-rlhf quickstart {SIZES['async-rlhf quickstart']}", place, log)
    made = place / "runs/quickstart"
    for name in ("sft", "reward", "data"):
        (place / "runs" / name).symlink_to(made / name)
    for name, kind in [*((name, "sft") for name in SFT), *((name, "reward") for name in REWARD)]:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).symlink_to(made / kind)
    (place / "my-org/pairs").mkdir()
    for file in ("pairs.jsonl", "runs/pairs.jsonl", "my-org/pairs/train.jsonl", "my-org/pairs/validation.jsonl"):
        shutil.copyfile(made / "pairs/pairs.jsonl", place / file)
    rows = [json.loads(line) for line in (made / "data/rl.jsonl").read_text("utf-8").splitlines()[:32]]
    lines(place / "prompts.jsonl", [row | {"answer": "Return", "number": 3} for row in rows])
    for file, name in (("heldout", "heldout"), ("demonstrations", "sft")):
        copied = (made / f"data/{name}.jsonl").read_text("utf-8").splitlines(keepends=True)
        (place / f"{file}.jsonl").write_text("".join(copied[:32]), encoding="utf-8")
    write(place / "ratings.jsonl", 60)
    for name, text in python().items():
        if name.endswith(".py"):
            (place / name).write_text(text, encoding="utf-8")
    with (place / "my_rewards.py").open("a") as file:
        file.write(
            "\n\ndef fn(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"
        )
        file.write("\n\ntrained = watched = fn\n")
    sizes = {"batches": 2, "completions_per_batch": 16, "max_prompt_length": 128, "generation": {"response_length": 8}}
    train = {"model": "runs/sft", "reward_model": "runs/reward", "data": {"train": "prompts.jsonl"}}
    (place / "run.yml").write_text(yaml.safe_dump(train | {"train": {"output_dir": "runs/new"} | sizes}))
    run(
        "async-rlhf train --config run.yml --train.output_dir runs/mine --train.save_steps 5 --train.batches 10 "
        "--train.rollouts all",
        place,
        log,
    )
    for name in ("policy", "dpo", "ten", "asynchronous"):
        shutil.copytree(place / "runs/mine", place / "runs" / name)
    for name in ("turn1", "step1"):
        shutil.copytree(place / "runs/sft", place / "runs/seeds" / name / "final")
    generate = "async-rlhf generate --run runs/dpo --models.sft runs/sft --data heldout.jsonl --response_length 8"
    run(f"{generate} --output_dir runs/generations", place, log)
    for name in ("guess", "sums"):
        run(["python", f"recipes/episodes/{name}.py", f"runs/{name}", "40"], place, log)
        sft = f"--train runs/{name}/demonstrations.jsonl --output_dir runs/{name}/sft"
        run(f"async-rlhf sft --config recipes/episodes/sft.yml {sft}", place, log)
    run("python recipes/science/make_sorting.py --sizes 40 40 40 --output runs/science/sorting", place, log)
    (place / "runs/reasoning_gym").mkdir()
    lines(place / "runs/reasoning_gym/train.jsonl", make_rows("leg_counting", 16, seed=0))
    run(small(next(one for words, one in COMMANDS.items() if "runs/science/sorting/sft" in words)), place, log)
    sweep = yaml.safe_load(
        re.search(r"```yaml\n(.*?)```", (ROOT / "docs/commands/sweep.md").read_text("utf-8"), re.DOTALL)[1]
    )
    sweep["base"] = yaml.safe_load((ROOT / sweep["base"]).read_text("utf-8"))
    del sweep["base"]["train"]["output_dir"]
    sweep["base"]["train"] |= {"batches": 2, "completions_per_batch": 16}
    sweep["held_out"] |= {"max_prompts": 20}
    (place / "sweep.yml").write_text(yaml.safe_dump(sweep | {"seeds": [0]}))
    (place / "onlinedpo_pythia410m.yml").write_text(yaml.safe_dump(ORIGINAL, sort_keys=False))
    run("async-rlhf config migrate onlinedpo_pythia410m.yml --ranks 3 --output dpo.yml", place, log)


def lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def here(place, tmp_path) -> Path:
    """A copy of that folder for one command, without its cache."""
    folder = tmp_path / "here"

    def take(source: str, target: str) -> None:
        (os.link if source.endswith(".safetensors") else shutil.copyfile)(source, target)

    shutil.copytree(place, folder, symlinks=True, copy_function=take, ignore=shutil.ignore_patterns("cache"))
    return folder


def small(one: Shown) -> list[str]:
    """Its words with ours in the place of placeholders, and behind them what makes it small."""
    text = re.sub(r"\bFILE\b", "run.yml", re.sub(r"\bRUN\b", "runs/mine", one.words))
    return shlex.split(
        " ".join([text, *(sizes for part, sizes in SIZES.items() if part in text)]).replace(" ...", f" {ELLIPSIS}")
    )


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_of_a_page_runs(words, here, tmp_path):
    given = small(COMMANDS[words])
    for option in ("--output_dir", "--train.output_dir", "--out", "--output"):
        if option in given and "--resume" not in given and "quickstart" not in given:
            made = here / given[len(given) - given[::-1].index(option)]
            made.unlink() if made.is_symlink() or made.is_file() else shutil.rmtree(made, ignore_errors=True)
    if given[:2] == ["async-rlhf", "recipes"]:
        (here / "recipes").unlink()
    said = [shape(line, given) for line in run(given, here, tmp_path / "log").splitlines()]
    told = [shape(line, given) for line in COMMANDS[words].told if line and not UNEQUAL.search(line)]
    told = [] if COMMANDS[words].page in NOT_COMPARED else told
    begun = [one.removesuffix("...") for one in told if one.endswith("...")]  # the rest of the line is left out
    assert (
        not set(told) - set(said) - {f"{one}..." for one in begun if any(f"{each} ".startswith(one) for each in said)}
    )


EXACT = ("recipes", "config", "grep")
NOT_COMPARED = {"docs/commands/explain.md", "docs/commands/evaluate.md", "docs/commands/diff.md"}
"""Their rows are what stood out in one run, and its checkpoints."""
UNEQUAL = re.compile(r"━|^ *[.]{3}|start-sft-")
"""Lines of which a page shows what another terminal, or other data, would not print."""


def shape(line: str, words: list[str]) -> str:
    """A line without what depends on sizes and times: numbers, and the frames of tables."""
    line = " ".join(re.sub(r"[│┃|]", " ", line).split())
    return line if set(EXACT) & set(words[:2]) else re.sub(r"[-+]?\d[\d.,:e+-]*%?", "0", line)
