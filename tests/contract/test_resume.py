"""A run that was stopped, however, goes on bit for bit: law 4."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import StopAfter, count_letters, json_rows, rare_unless
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from async_rlhf import KLConfig, LoRAConfig, ParallelConfig
from async_rlhf.algorithms.table import BUILT_IN, find
from async_rlhf.config import ConfigError, engines
from async_rlhf.generation.episodes.spec import named
from async_rlhf.models import budget
from async_rlhf.rewards.functions import load_object, load_reward_functions
from async_rlhf.run.checkpoint import FORMAT, ResumeState, as_saved
from async_rlhf.run.manifest import write_whole
from async_rlhf.run.trainer import OnlineTrainer

RUNS = {
    "online_dpo": {"samples_per_prompt": 2},
    "best_of_k": {"samples_per_prompt": 3},
    "rloo": {"samples_per_prompt": 2, "kl": KLConfig(coef=0.1, target=0.5, horizon=60)},
    "ppo": {"samples_per_prompt": 1, "num_epochs": 2, "value_learning_rate": 3e-3},
    "ppo_shared_trunk": {"shared_trunk": True},
    "ppo_decay": {"value_learning_rate": 3e-3, "weight_decay": 3.0},
    "grpo": {"samples_per_prompt": 3},
    "online_dpo_lora": {"lora": LoRAConfig(rank=3)},
    "ppo_lora": {"lora": LoRAConfig(rank=3)},
}


class NoisyReward:
    """A reward with a state of its own, and one that draws from the global generators."""

    __name__ = "noisy"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return [len(text) * 0.01 * noise + self.calls for text in completions]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def run(make_policy, tokenizer, prompts, args, name="online_dpo", callbacks=(), reward=None, final=False, **options):
    """The metrics, the samples, and every trained tensor, as they are after the run or where it was stopped."""
    trainer = OnlineTrainer(
        make_policy(),
        args,
        prompts,
        reward_funcs=[count_letters, NoisyReward()] if reward is None else reward,
        processing_class=tokenizer,
        callbacks=callbacks,
        **options,
    )
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    stopped = any(isinstance(callback, StopAfter) for callback in callbacks)
    with pytest.raises(SystemExit, match=r"^0$") if stopped else nullcontext():
        trainer.train()
    assert (Path(args.output_dir) / "final").exists() == (not stopped or final)
    return trainer, *logs_of(args)


def logs_of(args):
    folder = Path(args.output_dir)
    rows = json_rows(folder / "metrics.jsonl")
    metrics = [{k: v for k, v in row.items() if not k.startswith("time/") and k != "eps"} for row in rows]
    return metrics, (folder / "samples.jsonl").read_text().splitlines()


def assert_same(ours, theirs) -> None:
    assert ours[1] == theirs[1]
    assert ours[2] == theirs[2]
    weights = dict(theirs[0].learner.model.named_parameters())
    for name, parameter in ours[0].learner.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    for left, right in zip(finals(ours[0]), finals(theirs[0]), strict=True):
        assert left[0] == right[0]
        for name, tensor in left[1].items():
            assert torch.equal(tensor, right[1][name]), name


def finals(trainer):
    folder = Path(trainer.args.output_dir) / "final"
    return [(str(p.relative_to(folder)), load_file(p)) for p in sorted(folder.rglob("*.safetensors"))]


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_run_that_samples_stale_batches_in_turn_resumes_bit_for_bit(
    make_policy, tokenizer, prompts, make_args, staleness
):
    """The newest batch, which the checkpoint's own weights sample, is sampled again, and counts once."""
    options = {"staleness": staleness, "num_samples_logged": 100}
    options["generation"] = {"placement": "inline", "mismatch_steps": 1}
    whole = run(make_policy, tokenizer, prompts, make_args("whole", **options))
    run(make_policy, tokenizer, prompts, make_args("stopped", **options), callbacks=[StopAfter(2)])
    resumed = make_args("stopped", resume=True, **options)
    assert_same(run(make_policy, tokenizer, prompts, resumed), whole)
    held = (Path(resumed.output_dir) / "checkpoint-2" / "resume" / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in held] == list(range(3, 3 + staleness))


RESUMED = [*product(RUNS, [1, 0]), ("online_dpo", 3), ("ppo", 3)]


@pytest.mark.parametrize(("name", "staleness"), rare_unless(lambda i: i % 4 in (0, 3), RESUMED))
def test_a_resumed_run_is_the_uninterrupted_one(make_policy, tokenizer, prompts, make_args, name, staleness):
    algorithm = next(a for a in BUILT_IN if name.startswith(a))
    options = {"algorithm": algorithm, "staleness": staleness, "num_samples_logged": 100, **RUNS[name]}
    whole = run(make_policy, tokenizer, prompts, make_args("whole", **options), name)
    stopped = make_args("stopped", **options)
    _, metrics, _ = run(make_policy, tokenizer, prompts, stopped, name, callbacks=[StopAfter(3)])
    assert [row["batch"] for row in metrics] == [1, 2, 3]
    resumed = make_args("stopped", resume=True, **options)
    again = run(make_policy, tokenizer, prompts, resumed, name)
    assert_same(again, whole)
    assert [json.loads(line)["draw"] for line in again[2]] == [
        n for n in range(48) for _ in range(resumed.samples_per_prompt)
    ]
    if staleness:
        held = (Path(resumed.output_dir) / "checkpoint-3" / "resume" / "rollouts.jsonl").read_text().splitlines()
        assert [json.loads(line)["index"] for line in held] == list(range(4, 4 + staleness))


def test_the_newest_and_the_best_checkpoints_are_kept(make_policy, tokenizer, prompts, make_args, caplog):
    """The reward falls from batch to batch, so the first checkpoint is the best."""
    calls = []

    def falling(prompts, completions, **columns):
        calls.append(1)
        return [len(text) * 0.01 - len(calls) for text in completions]

    args = make_args(save_steps=1, save_total_limit=3, metric_for_best_model="objective/scores")
    trainer, _, _ = run(make_policy, tokenizer, prompts, args, reward=falling)
    kept = sorted(path.name for path in Path(args.output_dir).glob("checkpoint-*"))
    assert kept == ["checkpoint-1", "checkpoint-5", "checkpoint-6"]
    assert trainer.callbacks.state.best_model_checkpoint.endswith("checkpoint-1")
    args = make_args("other", save_steps=3, metric_for_best_model="score")
    run(make_policy, tokenizer, prompts, args)
    assert "metric_for_best_model: 'score' has not been logged so far" in caplog.text
    assert (Path(args.output_dir) / "checkpoint-6").exists()


def damage_truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_flip(folder: Path) -> None:
    file = folder / "resume" / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def damage_missing(folder: Path) -> None:
    (folder / "resume" / "rollouts.jsonl").unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_manifest, damage_missing])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(make_policy, tokenizer, prompts, make_args, damage, caplog):
    caplog.set_level("INFO")
    whole = run(make_policy, tokenizer, prompts, make_args("whole", staleness=1))
    args = make_args("damaged", staleness=1, save_steps=2)
    run(make_policy, tokenizer, prompts, args, callbacks=[StopAfter(5)])
    damage(Path(args.output_dir) / "checkpoint-5")
    again = make_args("damaged", staleness=1, save_steps=2, resume=True)
    assert_same(run(make_policy, tokenizer, prompts, again), whole)
    assert "checkpoint-5 is damaged and is passed over" in caplog.text
    assert "resuming after batch 4" in caplog.text


def test_a_run_whose_checkpoints_are_all_damaged_is_not_deleted(make_policy, tokenizer, prompts, make_args):
    args = make_args()
    run(make_policy, tokenizer, prompts, args, callbacks=[StopAfter(2)])
    damage_truncate(Path(args.output_dir) / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"resume: .* holds a run but no whole checkpoint"):
        run(make_policy, tokenizer, prompts, make_args(resume=True))
    assert (Path(args.output_dir) / "metrics.jsonl").exists()


def test_resume_without_a_checkpoint_starts_at_the_beginning(make_policy, tokenizer, prompts, make_args):
    whole = run(make_policy, tokenizer, prompts, make_args("whole"))
    assert_same(run(make_policy, tokenizer, prompts, make_args("new", resume=True)), whole)


def test_resume_from_a_checkpoint_elsewhere_leaves_it_alone(make_policy, tokenizer, prompts, make_args):
    args = make_args("first", staleness=1, save_steps=2)
    whole = run(make_policy, tokenizer, prompts, args)
    before = {p: p.read_bytes() for p in Path(args.output_dir).rglob("*") if p.is_file()}
    source = str(Path(args.output_dir) / "checkpoint-4")
    branch = run(make_policy, tokenizer, prompts, make_args("second", staleness=1, resume_from=source))
    assert branch[1] == whole[1][4:]
    assert_same((branch[0], [], []), (whole[0], [], []))
    assert before == {p: p.read_bytes() for p in Path(args.output_dir).rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=r"resume_from: got .*must be a whole checkpoint"):
        run(make_policy, tokenizer, prompts, make_args("third", resume_from=str(Path(args.output_dir) / "final")))


def test_what_would_break_exactness_is_named(make_policy, tokenizer, prompts, make_args, make_reward_model, caplog):
    run(make_policy, tokenizer, prompts, make_args(), callbacks=[StopAfter(2)])
    changed = {"resume": True, "learning_rate": 5e-4, "generation": {"temperature": 0.9}}
    with pytest.raises(ConfigError, match=r"generation.temperature: was 0.7, is 0.9\n  learning_rate: was 0.001, is"):
        run(make_policy, tokenizer, prompts, make_args(**changed))
    with pytest.raises(ConfigError, match="train_dataset: was"):
        run(make_policy, tokenizer, prompts[:-1], make_args(resume=True))
    other = [{**row, "name": row["name"].upper()} for row in prompts]  # a column that a reward may read
    with pytest.raises(ConfigError, match="train_dataset: was"):
        run(make_policy, tokenizer, other, make_args(resume=True))
    with pytest.raises(ConfigError, match="ref_model: was"):
        run(lambda: make_policy(4), tokenizer, prompts, make_args(resume=True))
    with pytest.raises(ConfigError, match="reward_model: was None, is"):
        run(make_policy, tokenizer, prompts, make_args(resume=True), reward_model=make_reward_model())
    with pytest.raises(ConfigError, match="algorithm: was 'online_dpo', is 'rloo'"):
        run(make_policy, tokenizer, prompts, make_args(resume=True, algorithm="rloo"), "rloo")
    _, metrics, _ = run(make_policy, tokenizer, prompts, make_args(**changed, resume_anyway=True))
    assert [row["batch"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert "resume_anyway: learning_rate: was 0.001, is 0.0005" in caplog.text


PLAYING = """
from dataclasses import replace

from transformers import TrainerCallback

from async_rlhf import Observation
from async_rlhf.algorithms.online_dpo import ONLINE_DPO
from async_rlhf.config.engines import ENGINES, EngineSpec
from async_rlhf.generation.transformers_engine import make as theirs
from beside_of_resume import REWARD

def loss(output, experience, config):
    return ONLINE_DPO.loss(output, experience, config)

MINE = replace(ONLINE_DPO, name="mine", loss=loss)

class Watch(TrainerCallback):
    pass

def make(spec, params):
    return theirs(spec, params)

ENGINE = EngineSpec(f"{__file__}:make", ENGINES["transformers"].supports)

class World:
    def reset(self, row, seed):
        pass
    def step(self, message):
        return Observation(reward=REWARD * len(message["content"]), done=True)
    def close(self):
        pass

def count(completions, **columns):
    return [REWARD * len(text) for text in completions]

async def agent(client, row):
    return REWARD * len((await client.chat([{"role": "user", "content": row["query"]}]))["content"])
"""


NAMES = {"reward_funcs": "count", "environment": "World", "agent": "agent", "algorithm": "MINE", "callbacks": "Watch"}


@pytest.mark.parametrize("what", [*NAMES, "engine"])
def test_code_that_was_changed_is_named(make_policy, tokenizer, prompts, make_args, tmp_path, caplog, what):
    """Of the file itself, and of one beside it that it imports; an older checkpoint knows of none."""
    file, beside = tmp_path / "played.py", tmp_path / "beside_of_resume.py"
    file.write_text(PLAYING)
    beside.write_text("REWARD = 1.0\n")
    name, plays = f"{file}:{NAMES.get(what, 'ENGINE')}", what in ("environment", "agent")
    generation = {"max_turns": 1} if plays else {"engine": name} if what == "engine" else {}

    def train(callbacks=(), **changes):
        engines.find.cache_clear()
        options = {"callbacks": callbacks, "reward": () if plays else count_letters}
        if what == "reward_funcs":
            options["reward"] = load_reward_functions([name])
        elif plays:
            options[what] = named(name, what)
        elif what == "callbacks":
            options["callbacks"] = [*callbacks, load_object(name, what)]
        elif what == "algorithm":
            options["algorithm"] = find(name)
        return run(make_policy, tokenizer, prompts, make_args(generation=generation, **changes), **options)

    run_of = train([StopAfter(2)])
    state = Path(run_of[0].args.output_dir) / "checkpoint-2" / "resume" / "state.json"
    inputs = json.loads(state.read_text())["inputs"]
    others = {"code of tiny.py", "code of conftest.py"}  # of what these tests always give
    files = {key for key in inputs if key.startswith("code of")} - others
    assert {"code of played.py", "code of beside_of_resume.py"} == files
    for path, text in ((beside, "REWARD = 2.0\n"), (file, PLAYING + "# a comment\n")):
        before = path.read_text()
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"\n  code of {path.name}: was '\w+', is '\w+'\nset them back"):
            train(resume=True)
        path.write_text(before)
    file.write_text(PLAYING + "# a comment\n")
    train(resume=True, resume_anyway=True)
    assert "resume_anyway: code of played.py: was" in caplog.text


def test_a_second_stop_before_anything_is_logged(make_policy, tokenizer, prompts, make_args):
    """Lines behind the checkpoint are cut off, and the position is right from then on, not from the next line on."""

    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 7:
                raise ArithmeticError("lines of batch 3 and 6 are there, and the checkpoint after batch 4")

    options = {"logging_steps": 3, "save_steps": 4, "total_episodes": 80}
    whole = run(make_policy, tokenizer, prompts, make_args("whole", **options))
    with pytest.raises(ArithmeticError):
        run(make_policy, tokenizer, prompts, make_args("stopped", **options), callbacks=[Breaks()])
    resumed = make_args("stopped", resume=True, **options)
    run(make_policy, tokenizer, prompts, resumed, callbacks=[StopAfter(5)])
    assert_same(run(make_policy, tokenizer, prompts, resumed), whole)


def test_going_back_deletes_the_future_that_was(make_policy, tokenizer, prompts, make_args):
    args = make_args(save_steps=1)
    whole = run(make_policy, tokenizer, prompts, args)
    back = make_args(save_steps=1, save_total_limit=2, resume_from=str(Path(args.output_dir) / "checkpoint-2"))
    (Path(args.output_dir) / ".checkpoint-4.tmp").mkdir()
    run(make_policy, tokenizer, prompts, back, callbacks=[StopAfter(3)], final=True)
    assert sorted(p.name for p in Path(args.output_dir).glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-3"]
    again = make_args(save_steps=1, save_total_limit=2, resume=True)
    assert_same(run(make_policy, tokenizer, prompts, again), whole)


def test_resuming_from_elsewhere_deletes_no_other_run(make_policy, tokenizer, prompts, make_args):
    first, second = make_args("first", save_steps=2), make_args("second", save_steps=2)
    run(make_policy, tokenizer, prompts, first)
    run(make_policy, tokenizer, prompts, second)
    source = str(Path(first.output_dir) / "checkpoint-2")
    with pytest.raises(ConfigError, match=r"output_dir: .*second' holds an earlier run"):
        run(make_policy, tokenizer, prompts, make_args("second", save_steps=2, resume_from=source))
    # A branch that was stopped goes on from its own checkpoint when it is started in the same way again.
    branch = make_args("third", save_steps=2, resume_from=source, resume=True)
    run(make_policy, tokenizer, prompts, branch, callbacks=[StopAfter(5)])
    trainer, metrics, _ = run(make_policy, tokenizer, prompts, branch)
    assert trainer.run.folder.checkpoint.name == "checkpoint-5"
    assert [row["batch"] for row in metrics] == [3, 4, 5, 6]


def test_a_checkpoint_of_another_format_is_refused(make_policy, tokenizer, prompts, make_args):
    """As an earlier version of the package has written it: without the number."""
    args = make_args(save_steps=2)
    run(make_policy, tokenizer, prompts, args, callbacks=[StopAfter(2)])
    checkpoint, copy = Path(args.output_dir) / "checkpoint-2", Path(args.output_dir).parent / "earlier"
    state = json.loads((checkpoint / "resume" / "state.json").read_text())
    assert state.pop("format") == FORMAT
    (checkpoint / "resume" / "state.json").write_text(json.dumps(state))
    (checkpoint / "manifest.json").unlink()
    write_whole(copy, [lambda folder: shutil.copytree(checkpoint, folder, dirs_exist_ok=True)])
    with pytest.raises(ConfigError, match=r"earlier' is a checkpoint of format 1; must be of format 3: go on with"):
        run(make_policy, tokenizer, prompts, make_args("anew", resume_from=str(copy)))


def test_a_run_is_not_made_shorter_than_its_checkpoint(make_policy, tokenizer, prompts, make_args):
    run(make_policy, tokenizer, prompts, make_args(), callbacks=[StopAfter(4)])
    with pytest.raises(ConfigError, match="total_episodes: got 24; must be at least the 32"):
        run(make_policy, tokenizer, prompts, make_args(resume=True, total_episodes=24))


def test_auto_stays_what_it_was_when_the_run_began(make_policy, tokenizer, prompts, make_args, monkeypatch):
    """Also where other memory would be left; the run's record says what was asked for."""
    limits = {"max_tokens_per_pass": "auto", "annotate_max_tokens": "auto"}
    monkeypatch.setattr(budget, "_ON_CPU", {"gradient_checkpointing": False, **dict.fromkeys(limits, 50)})
    whole = run(make_policy, tokenizer, prompts, make_args("whole", **limits))
    run(make_policy, tokenizer, prompts, make_args("stopped", **limits), callbacks=[StopAfter(3)])
    monkeypatch.setattr(budget, "_ON_CPU", {"gradient_checkpointing": True, **dict.fromkeys(limits, 9000)})
    args = make_args("stopped", resume=True, **limits)
    again = run(make_policy, tokenizer, prompts, args)
    assert_same(again, whole)
    config = again[0].args
    found = config.max_tokens_per_pass, config.annotate_max_tokens, config.gradient_checkpointing
    assert found == (50, 50, False)
    asked = yaml.safe_load((Path(args.output_dir) / "run.yml").read_text())["train"]
    assert [asked[name] for name in (*limits, "gradient_checkpointing")] == ["auto"] * 3
    other = make_args("stopped", resume=True, max_tokens_per_pass=60, annotate_max_tokens="auto")
    with pytest.raises(ConfigError, match="max_tokens_per_pass: was 50, is 60"):
        run(make_policy, tokenizer, prompts, other)


def test_a_run_can_be_made_longer(make_policy, tokenizer, prompts, make_args):
    """The last checkpoint of a finished run: what its schedule had not sampled is sampled by the newest weights."""
    args = make_args(staleness=2, save_steps=3, lr_scheduler_type="constant")
    run(make_policy, tokenizer, prompts, args)
    shutil.rmtree(Path(args.output_dir) / "final")
    longer = make_args(
        staleness=2, save_steps=10, lr_scheduler_type="constant", resume=True, total_episodes=80, logging_steps=1
    )
    _, metrics, _ = run(make_policy, tokenizer, prompts, longer)
    assert [(row["batch"], row["schedule/version"]) for row in metrics] == [
        (1, 0), (2, 0), (3, 0), (4, 1), (5, 2), (6, 3), (7, 6), (8, 6), (9, 6), (10, 7)
    ]  # fmt: skip


def test_callbacks_with_a_state_get_it_back(make_policy, tokenizer, prompts, make_args):
    class Counter(TrainerCallback, ExportableState):
        def __init__(self) -> None:
            self.seen = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.seen += 1

        def state(self):
            return {"args": {}, "attributes": {"seen": self.seen}}

    run(make_policy, tokenizer, prompts, make_args(), callbacks=[Counter(), StopAfter(2)])
    counter = Counter()
    trainer, _, _ = run(make_policy, tokenizer, prompts, make_args(resume=True), callbacks=[counter])
    assert counter.seen == 6
    assert trainer.callbacks.state.episode == 48
    assert [logs["step"] for logs in trainer.callbacks.state.log_history] == [1, 2, 3, 4, 5, 6]


def test_a_callback_may_draw_random_numbers_when_the_run_begins(make_policy, tokenizer, prompts, make_args):
    class Draws(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            random.random(), np.random.rand(), torch.rand(())

    whole = run(make_policy, tokenizer, prompts, make_args("whole"), callbacks=[Draws()])
    run(make_policy, tokenizer, prompts, make_args("stopped"), callbacks=[Draws(), StopAfter(2)])
    again = run(make_policy, tokenizer, prompts, make_args("stopped", resume=True), callbacks=[Draws()])
    assert_same(again, whole)


def test_nothing_is_unpickled(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=1)
    run(make_policy, tokenizer, prompts, args, callbacks=[StopAfter(2)])
    files = [p for p in (Path(args.output_dir) / "checkpoint-2").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {".json", ".jsonl", ".safetensors", ".jinja", ".md"}


def test_servers_may_move_but_not_multiply(make_args):
    def served(*urls: str, **changes):
        generation = {"engine": "vllm", "placement": "server", "urls": list(urls)}
        return make_args(generation=generation, staleness=1, **changes)

    before = served("http://a:1", "http://a:2")
    state = ResumeState(batch=1, config=as_saved(before, "online_dpo"), inputs={}, values={}, logs={})
    state.check(served("http://b:1", "http://c:2"), "online_dpo")
    with pytest.raises(ConfigError, match=r"number of generation.urls: was 2, is 1"):
        state.check(served("http://b:1"), "online_dpo")
    state.check(served("http://b:1", resume_anyway=True), "online_dpo")


def test_as_many_ranks_with_as_large_a_batch(make_args):
    """Else prompts would be passed over: who has which draw follows from the size of a batch."""
    before = make_args(parallel=ParallelConfig(ranks=2), total_episodes=96)
    state = ResumeState(batch=1, config=as_saved(before, "online_dpo"), inputs={}, values={}, logs={})
    state.check(make_args(parallel=ParallelConfig(ranks=2), total_episodes=192), "online_dpo")
    with pytest.raises(ConfigError, match=r"parallel.ranks: was 2, is 1\n +prompts per batch: was 16, is 8"):
        state.check(make_args(total_episodes=96), "online_dpo")
