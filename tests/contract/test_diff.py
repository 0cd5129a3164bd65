"""`async-rlhf diff`: where runs part, and why. Each cause is planted alone, and must be named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file, save_file
from tiny import PROMPTS, byte_tokenizer, json_rows, new_args, new_policy, rare
from transformers import TrainerCallback

from async_rlhf.cli import main
from async_rlhf.commands.train import run_train
from async_rlhf.config import ConfigError, KLConfig
from async_rlhf.models.publish import SnapshotRing
from async_rlhf.models.saving import write_model
from async_rlhf.run.config import DataConfig, RunConfig
from async_rlhf.run.folder import rollouts_file
from async_rlhf.studies.diff.command import compare
from async_rlhf.studies.diff.config import DiffConfig

REWARD = """
import random
from pathlib import Path

def letters(prompts, completions, **columns):
    return [sum(c.isascii() and c.isalpha() for c in text) + 0.01 * len(text) for text in completions]

def length(prompts, completions, **columns):
    return [len(text) / 10 for text in completions]

def careless(prompts, completions, **columns):
    count = Path(__file__).with_name("count")
    count.write_text(count.read_text() + "." if count.exists() else ".")
    return [len(text) + (len(count.read_text()) == 8) for text in completions]
"""
WORLD = """
from async_rlhf import Environment, Observation

class World(Environment):
    said = "go on"

    def reset(self, row, seed):
        self.turns = 0
        return []

    async def step(self, message):
        self.turns += 1
        reward = float(len(message["content"]))
        return Observation([] if self.turns == 2 else [{"role": "user", "content": SAID}], reward, self.turns == 2)

class Other(World):
    pass
"""


class Here:
    """A folder with a policy, data, rewards and runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_model(new_policy(max_position_embeddings=160), byte_tokenizer(), folder / "policy")
        self.rows(PROMPTS)
        (folder / "reward.py").write_text(REWARD)

    def rows(self, rows: list[dict], name: str = "prompts.jsonl") -> str:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(self.folder / name)

    def run(self, name: str, how: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **changes) -> str:
        """A run of four batches; ``how`` it samples, and ``more`` of the command's keys."""
        generation = {"placement": "inline", **(how or {})}
        sizes = {"total_episodes": 32, "staleness": 1, "samples_per_prompt": 2, "save_steps": 0, "kl": KLConfig(0.02)}
        args = new_args(self.folder, name, generation, "grpo", **{**sizes, **changes})
        config = RunConfig(
            **{
                "model": str(self.folder / "policy"),
                "data": DataConfig(str(self.folder / "prompts.jsonl")),
                "reward_funcs": [f"{self.folder / 'reward.py'}:{name}" for name in ("letters", "length")],
                "train": args,
                "algorithm": "grpo",
                **(more or {}),
            }
        )
        run_train(config)
        return args.output_dir


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return Here(tmp_path_factory.mktemp("diff"))


@pytest.fixture(scope="module")
def base(here):
    return here.run("base")


def found(*runs: str, **options) -> dict[str, Any]:
    return compare(DiffConfig(list(runs), **options))


def with_one_tensor(folder: Path) -> str:
    changed = folder.parent / "another_policy"
    write_model(new_policy(max_position_embeddings=160), byte_tokenizer(), changed)
    weights = load_file(changed / "model.safetensors")
    weights["gpt_neox.layers.0.attention.dense.weight"][0, 0] += 1e-3
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    return str(changed)


ROWS = [{**row, "query": row["query"] + " " * (n == 6)} for n, row in enumerate(PROMPTS)]
KEYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "seed": ("prompts", "train.seed is 0 in the first and 1 in the second", {"seed": 1}),
    "staleness": ("versions", "train.staleness is 1 in the first and 2", {"staleness": 2}),
    "temperature": ("tokens", "train.generation.temperature is", {"how": {"temperature": 0.9}}),
    "rate": ("metrics", "train.learning_rate is", {"learning_rate": 3e-4}),
    "weight of a reward": ("scores", "train.reward_weights is", {"reward_weights": [1.0, 0.5]}),
    "penalty": ("scores", "train.length_penalty is", {"length_penalty": 0.1}),
    "kl": ("metrics", "train.kl.coef is", {"kl": KLConfig(0.05)}),
    "epochs": ("metrics", "train.num_epochs is", {"num_epochs": 2}),
    "sixteen bits": ("tokens", "train.bf16 is False in the first and True", {"bf16": True}),
}
"""What differs first, the cause, and what is planted."""


OFTEN = ("seed", "staleness", "temperature", "weight of a reward")


@pytest.mark.parametrize("kind", [kind if kind in OFTEN else rare(kind) for kind in KEYS])
def test_a_key_is_named(here, base, kind):
    part, cause, changes = KEYS[kind]
    account = found(base, here.run(kind.replace(" ", "_"), **changes))
    assert not account["equal"]
    assert (account["part"], account["cause"][: len(cause)]) == (part, cause)


def test_a_run_and_its_repetition_are_equal(here, base):
    again = here.run("again")
    assert found(base, again)["equal"]
    assert json_rows(Path(base, "digests.jsonl")) == json_rows(Path(again, "digests.jsonl"))
    assert [row["batch"] for row in json_rows(Path(base, "digests.jsonl"))] == [1, 2, 3, 4]


def test_where_runs_sample_is_no_difference(here, base):
    """In the learner's process, or in another one."""
    process = here.run("process", {"placement": "process"})
    assert found(base, process)["equal"]
    first, *_, last = json_rows(Path(process, "digests.jsonl"))
    assert "gpt_neox.embed_in.weight" in first["tensors"]
    assert "weights" not in last  # no batch needed them: they were not published


def test_one_changed_row_and_another_order_are_named(here, base):
    changed = here.run("row", more={"data": DataConfig(here.rows(ROWS, "changed.jsonl"))})
    assert found(base, changed)["cause"] == "the training data: the first to differ is row 7 (query)"
    turned = here.run("order", more={"data": DataConfig(here.rows(PROMPTS[::-1], "turned.jsonl"))})
    assert found(base, turned)["cause"].startswith("the training data: the same rows in another order, from row 1")
    here.rows(ROWS)
    same_file = here.run("same_file")
    account = found(base, same_file)
    here.rows(PROMPTS)
    assert (account["part"], account["cause"]) == ("prompts", account["rows"])
    assert account["rows"].endswith("so the files have changed since, or their prompts were written in another way")


def test_code_of_rewards_is_named(here, base):
    text = REWARD.replace("0.01 * len(text)", "0.02 * len(text)")
    (here.folder / "reward.py").write_text(text)
    changed = here.run("code")
    (here.folder / "reward.py").write_text(REWARD)
    account = found(base, changed)
    assert (account["part"], account["cause"]) == ("reward/letters", "code of reward.py")


def test_the_starting_model_is_named_by_its_tensor(here):
    whole = here.run("model_0", {"placement": "process"})
    changed = here.run("model_1", {"placement": "process"}, more={"model": with_one_tensor(here.folder / "policy")})
    account = found(whole, changed)
    assert account["part"] == "weights"
    assert account["cause"].startswith("the starting model: gpt_neox.layers.0.attention.dense.weight")
    assert "another_policy" in next(each["text"] for each in account["given"] if each["name"] == "model")


def test_the_tokenizer_and_the_template_are_named(here):
    rows = [{"query": [{"role": "user", "content": row["query"]}]} for row in PROMPTS]
    chats = DataConfig(here.rows(rows, "chats.jsonl"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    folders = [here.folder / f"tokenizer_{n}" for n in range(2)]
    for n, folder in enumerate(folders):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template.replace("content }}", "content }}" + "!" * n)
        tokenizer.save_pretrained(folder)
    runs = [here.run(f"chat_{n}", more={"data": chats, "tokenizer": str(folder)}) for n, folder in enumerate(folders)]
    account = found(*runs)
    assert account["part"] == "prompts"
    assert {"tokenizer"} <= {each["name"] for each in account["given"] if each["kind"] == "input"}
    assert account["cause"].startswith("tokenizer")
    system = [new_args(here.folder, "x").chat, replace(new_args(here.folder, "x").chat, system="Be brief.")]
    told = [
        here.run(f"told_{n}", more={"data": chats, "tokenizer": str(folders[0])}, chat=c) for n, c in enumerate(system)
    ]
    assert found(*told)["cause"].startswith("train.chat.system is None in the first and 'Be brief.'")


class Draws(TrainerCallback):
    """Draws in batch 3."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            torch.rand(1)


class Slows(TrainerCallback):
    """Changes the learning rate from batch 2 on."""

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step >= 1:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def test_callbacks_that_draw_or_change_the_rate_are_named(here, base):
    drew = here.run("drew", more={"callbacks": [f"{__file__}:Draws"]})
    account = found(base, drew)
    assert (account["batch"], account["part"]) in {(3, "random"), (4, "random")}
    assert account["cause"].startswith("callbacks is [] in the first")
    slowed = here.run("slowed", more={"callbacks": [f"{__file__}:Slows"]})
    account = found(base, slowed)
    assert (account["batch"], account["part"]) == (2, "metrics")
    assert "callbacks" in account["cause"]


def test_a_reward_that_keeps_count_is_named(here):
    more = {"reward_funcs": [f"{here.folder / 'reward.py'}:careless"]}
    first = here.run("careless_0", more=more)
    (here.folder / "count").unlink()
    (here.folder / "count").write_text("....")
    account = found(first, here.run("careless_1", more=more))
    assert account["part"] == "reward/careless"
    assert account["cause"].startswith("the reward function returned another number for the same completion")


def test_an_environment_that_says_something_else_is_named(here):
    how, runs = {"max_turns": 2, "response_length": 8, "episode_length": 40, "stop_token_ids": list(range(60))}, []
    for n, said in enumerate(('"go on"', 'str(__import__("time").time_ns())')):
        (here.folder / "world.py").write_text(WORLD.replace("SAID", said))
        more = {"environment": f"{here.folder / 'world.py'}:World", "reward_funcs": []}
        runs.append(here.run(f"world_{n}", how, more=more))
    assert found(*runs)["part"] == "episodes"
    assert found(*runs)["cause"] == "code of world.py"
    again = here.run("world_2", how, more=more)
    assert found(runs[1], again)["cause"].startswith("the environment, a tool or an agent answered the same words")


def with_machine(run: str, name: str, value: Any, copy: Path) -> str:
    """The run as if its first start had noted something else of its machine, and its numbers had other last digits."""
    copy.mkdir()
    for file in ("run.yml", "metrics.jsonl", "digests.jsonl", "environment.json"):
        (copy / file).write_bytes(Path(run, file).read_bytes())
    starts = json.loads((copy / "environment.json").read_text())
    starts[0][name] = {**starts[0][name], **value} if isinstance(value, dict) else value
    (copy / "environment.json").write_text(json.dumps(starts))
    rows = json_rows(copy / "digests.jsonl")
    rows[1]["logprobs"] = "0" * 16
    (copy / "digests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(copy)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("packages", {"torch": "0.0"}, "packages.torch is "),
        ("processor", {"kernels": "of no processor"}, "processor.kernels is"),
        ("arithmetic", {"NVIDIA_TF32_OVERRIDE": "1"}, "arithmetic.NVIDIA_TF32_OVERRIDE is None in the first and '1'"),
        ("threads", {"learner": 64}, "threads.learner is"),
        ("ranks", 2, "ranks is 1 in the first and 2 in the second"),
        ("device", "NVIDIA H200", "device is 'cpu' in the first and 'NVIDIA H200' in the second"),
    ],
)
def test_machines_and_libraries_are_named(base, tmp_path, name, value, cause):
    account = found(base, with_machine(base, name, value, tmp_path / "other"))
    assert (account["batch"], account["part"], account["other_tokens"]) == (2, "logprobs", None)
    assert account["cause"].startswith(cause)


def test_a_variable_that_decides_arithmetic_is_noted(here, base, monkeypatch):
    """One that no processor here heeds, whatever a test run has set."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    account = found(base, here.run("noted"))
    assert account["equal"]
    assert [each["name"] for each in account["given"]][-1] == "arithmetic.CUBLAS_WORKSPACE_CONFIG"


ENGINE = """
from pathlib import Path

from async_rlhf.config.engines import ENGINES, EngineSpec
from async_rlhf.generation.transformers_engine import make as make_transformers
from async_rlhf.models.weights import digests

def make(spec, params):
    engine = make_transformers(spec, params)
    load = engine.load

    def lie(tensors, version):
        if version != 2 or not Path(__file__).with_name("lies").exists():
            return load(tensors, version)
        engine.version = version
        return digests(tensors)

    engine.load = lie
    return engine

ENGINE = EngineSpec(f"{__file__}:make", ENGINES["transformers"].supports - {"policy"})
"""


def test_weights_that_were_not_delivered_are_named(here):
    """Planted: an engine that keeps the weights of the version before, and says that it has the new ones."""
    (here.folder / "engine.py").write_text(ENGINE)
    how = {"engine": f"{here.folder / 'engine.py'}:ENGINE", "placement": "process", "mismatch_samples": 0}
    honest = here.run("honest", {**how, "probe_steps": 0})
    (here.folder / "lies").touch()
    account = found(honest, here.run("lies_", {**how, "probe_steps": 0}))
    assert (account["batch"], account["part"]) == (4, "tokens")
    assert account["cause"].startswith("an engine sampled with other weights than those that were published")


def test_a_copy_that_was_not_written_is_named(here, monkeypatch):
    """Planted: version 2 of what is published is what was in its place before, checksums and all."""
    whole = here.run("whole", {"placement": "process"})
    places = SnapshotRing._places
    monkeypatch.setattr(SnapshotRing, "_places", lambda ring, model, n, p: {} if n == 2 else places(ring, model, n, p))
    how = {"placement": "process", "probe_steps": 0, "mismatch_samples": 0}
    account = found(whole, here.run("unwritten", how))
    assert (account["batch"], account["part"]) == (3, "weights")
    assert account["cause"].startswith("the weights that were published for it are not the policy's")


def test_the_first_number_is_found_by_repeating(here, base, capsys):
    other = here.run("repeated", learning_rate=3e-4, save_steps=2)
    with pytest.raises(SystemExit) as ended:
        main(["diff", base, other, "--repeat"])
    assert ended.value.code == 1
    account = found(base, other, repeat=True)
    values = account["values"]
    assert values["what"] == "weight after the update"
    assert values["values"][0] != values["values"][1]
    assert values["units"] > 1
    out = capsys.readouterr().out
    assert "the first number that differs: weight after the update" in out
    assert "most likely cause: train.learning_rate is" in out


def test_tokens_are_found_by_repeating(here, base):
    account = found(base, here.run("warmer", {"temperature": 1.1}), repeat=True)
    assert account["part"] == "tokens"
    assert account["values"]["what"] == "token"
    assert account["values"]["drawn"]
    assert account["values"]["position"] >= 6


def test_kept_rollouts_have_the_first_number(here):
    """Without a repetition, so of any runs."""
    runs = [here.run(f"kept_{n}", {"temperature": 1.0 - n / 20}, rollouts="all") for n in range(2)]
    values, sample = found(*runs)["values"], read_table(rollouts_file(Path(runs[0]), 1)).to_pylist()
    row = sample[values["sample"] - 1]
    assert (values["what"], values["values"][0]) == ("tokens", row["tokens"][values["position"]])
    assert row["sampled"][values["position"]]
    (here.folder / "reward.py").write_text(REWARD.replace("0.01 * len(text)", "0.02 * len(text)"))
    changed = here.run("kept_2", {"temperature": 1.0}, rollouts="all")
    (here.folder / "reward.py").write_text(REWARD)
    values = found(runs[0], changed)["values"]
    assert (values["what"], values["sample"]) == ("reward/letters", 1)
    assert values["values"][1] > values["values"][0] == pytest.approx(sample[0]["reward/letters"])


def test_one_run_is_compared_with_itself(base, capsys):
    main_account = found(base, batches=3)
    assert main_account["equal"]
    assert main_account["compared"] == {"first": 1, "last": 3, "by": "digests"}
    assert main_account["given"] == []


def test_many_runs_are_a_table(here, base, tmp_path):
    again, other = here.run("many_0"), here.run("many_1", staleness=0)
    account = found(base, again, other)
    assert [row["where"] for row in account["table"]] == [None, (2, "versions"), (2, "versions")]
    assert not account["equal"]


def test_older_runs_are_compared_by_their_metrics(here, base, tmp_path):
    copy = Path(with_machine(base, "ranks", 1, tmp_path / "older"))
    (copy / "digests.jsonl").unlink()
    account = found(base, str(copy))
    assert account["equal"]
    assert account["compared"]["by"] == "metrics"
    rows = json_rows(copy / "metrics.jsonl")
    rows[2]["lr"] *= 2
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"batch": 5.0, "comp')
    account = found(base, str(copy))
    assert (account["batch"], account["part"], account["cause"][:17]) == (3, "metrics", "the learning rate")


def test_a_run_that_still_trains_is_refused(base):
    words = [sys.executable, str(Path(__file__).with_name("holder.py")), str(Path(base, ".run.lock"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {holder.pid}"):
            found(base, base)
        holder.communicate("\n")


def test_what_cannot_be_compared_is_refused(here, base, tmp_path, capsys):
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["diff", *words])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert f"got {str(tmp_path)!r}; must be the output folder of a run" in refused(base, str(tmp_path))
    dpo = tmp_path / "dpo"
    with_machine(base, "ranks", 1, dpo)
    (dpo / "run.yml").write_text((dpo / "run.yml").read_text().replace("algorithm: grpo", "algorithm: rloo"))
    assert "is of algorithm grpo" in refused(base, str(dpo))
    version = with_machine(base, "async_rlhf", {"version": "0.0.1"}, tmp_path / "version")
    assert "is of version of async_rlhf" in refused(base, version)
    empty = Path(with_machine(base, "ranks", 1, tmp_path / "empty"))
    for name in ("metrics.jsonl", "digests.jsonl"):
        (empty / name).write_text("")
    assert "has trained on no batch" in refused(base, str(empty))
    damaged = Path(with_machine(base, "ranks", 1, tmp_path / "damaged"))
    for text in ("", "- a\n", "3\n"):
        (damaged / "run.yml").write_text(text)
        assert "must have a run.yml with keys: this one is damaged" in refused(base, str(damaged))
    (damaged / "run.yml").write_bytes(Path(base, "run.yml").read_bytes())
    (damaged / "environment.json").write_text('[{"async_rlhf": []}]')
    assert "is of version of async_rlhf" in refused(base, str(damaged))
    assert "must be null for several runs" in refused(base, base, "--batches", "2")
    assert "must be false but for two runs" in refused(base, "--repeat")
