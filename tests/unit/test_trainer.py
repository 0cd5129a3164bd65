"""The trainer around the loop: callbacks, files, schedule of the learning rate, precision, ties."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import count_letters
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

from async_rlhf import GRPOTrainer, LoRAConfig, OnlineDPOTrainer, OnlineTrainerState, PPOTrainer
from async_rlhf.algorithms.table import find
from async_rlhf.commands.sft import run_sft
from async_rlhf.config import ConfigError, SFTConfig
from async_rlhf.models.saving import write_model
from async_rlhf.rewards.functions import RewardError
from async_rlhf.run import trainer as trainers
from async_rlhf.run.build import build
from async_rlhf.run.inputs import Inputs
from async_rlhf.run.trainer import OnlineTrainer


def train(make_policy, tokenizer, prompts, args, reward=count_letters, **options):
    trainer = OnlineDPOTrainer(make_policy(), args, prompts, reward_funcs=reward, processing_class=tokenizer, **options)
    state = trainer.train()
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    return trainer, state, [json.loads(line) for line in lines]


class Recorder(TrainerCallback):
    """Notes every event, and stops the run after a batch if told to."""

    def __init__(self, stop_after: int = 0) -> None:
        self.events: list[tuple[str, int]] = []
        self.stop_after = stop_after

    def on_train_begin(self, args, state, control, **kwargs):
        assert isinstance(state, OnlineTrainerState)
        assert args.online_config.num_batches == state.max_steps
        assert kwargs["model"] is not None
        self.events.append(("begin", state.episode))

    def on_step_begin(self, args, state, control, **kwargs):
        self.events.append(("step_begin", state.episode))

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step_end", state.episode))
        control.should_training_stop |= state.global_step == self.stop_after

    def on_log(self, args, state, control, logs, **kwargs):
        assert logs["episode"] == state.episode
        self.events.append(("log", state.episode))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        assert metrics["eval_objective/scores"] >= 0
        self.events.append(("evaluate", state.episode))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.episode))

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append(("end", state.episode))


def test_a_run_is_built_whole_and_trains_as_a_trainer_does(make_policy, tokenizer, prompts, make_args):
    """All that it is made of is there, restored where it goes on, before anything is sampled."""
    trained, state, _ = train(make_policy, tokenizer, prompts, make_args("trainer", save_steps=3))
    args = make_args("run", resume_from=str(Path(trained.args.output_dir) / "checkpoint-3"))
    inputs = Inputs(make_policy(), prompts, reward_funcs=[count_letters], processing_class=tokenizer)
    run = build(args, inputs)
    absent = {item.name for item in fields(run) if getattr(run, item.name) is None}
    assert absent == {"eval_prompts"}
    with pytest.raises(FrozenInstanceError):
        run.learner = None
    assert run.callbacks.state.global_step == run.learner.scheduler.last_epoch // 2 == 3
    assert trainers.train(run).global_step == state.global_step == 6
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, run.learner.policy.state_dict()[name]), name


def test_callbacks_see_every_event_in_order(make_policy, tokenizer, prompts, make_args):
    recorder = Recorder()
    args = make_args(logging_steps=3, save_steps=4, eval_steps=2)
    train(make_policy, tokenizer, prompts, args, callbacks=[recorder], eval_dataset=prompts[:4])
    steps = [event for b in range(1, 7) for event in (("step_begin", 8 * b - 8), ("step_end", 8 * b))]
    assert [e for e in recorder.events if e[0].startswith("step")] == steps
    logged = [("log", episode) for episode in (16, 24, 32, 48, 48)]  # batches 3 and 6, and every evaluation
    assert [e for e in recorder.events if e[0] == "log"] == logged
    assert [e for e in recorder.events if e[0] == "evaluate"] == [("evaluate", 16), ("evaluate", 32), ("evaluate", 48)]
    assert [e for e in recorder.events if e[0] == "save"] == [("save", 32), ("save", 48)]
    assert (recorder.events[0], recorder.events[-1]) == (("begin", 0), ("end", 48))


def test_a_callback_can_stop_an_asynchronous_run(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=2)
    _, state, metrics = train(make_policy, tokenizer, prompts, args, callbacks=[Recorder(stop_after=3)])
    assert (state.global_step, state.episode, state.completions) == (3, 24, 48)
    assert [m["batch"] for m in metrics] == [1, 2, 3]
    assert (Path(args.output_dir) / "final" / "model.safetensors").exists()


def test_checkpoints_load_anywhere_and_generation_from_them_stops(make_policy, tokenizer, prompts, make_args):
    args = make_args(save_steps=3)
    trainer, _, _ = train(make_policy, tokenizer, prompts, args)
    folder = Path(args.output_dir)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    assert not list(folder.glob(".*"))
    for name in ("checkpoint-6", "final"):
        loaded = AutoModelForCausalLM.from_pretrained(folder / name)
        for key, tensor in trainer.model.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[key]), key
        assert GenerationConfig.from_pretrained(folder / name).eos_token_id == [256]
        assert AutoTokenizer.from_pretrained(folder / name).get_vocab() == tokenizer.get_vocab()
    state = OnlineTrainerState.load_from_json(str(folder / "checkpoint-3" / "trainer_state.json"))
    assert (state.global_step, state.episode, state.completions) == (3, 24, 48)


def test_rounding_leaves_adapters_and_values_as_they_are(make_policy, tokenizer, prompts, make_args):
    options = {"save_steps": 6, "lora": LoRAConfig(rank=2), "algorithm": "ppo", "export_dtype": "bfloat16"}
    args = make_args(**options)
    reward = {"reward_funcs": count_letters, "processing_class": tokenizer}
    PPOTrainer(make_policy(), args, prompts, **reward).train()
    whole, rounded = (Path(args.output_dir) / name for name in ("checkpoint-6", "final"))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (rounded, whole))
    assert all(torch.equal(tensor, theirs[name].to(torch.bfloat16)) for name, tensor in ours.items())
    for file in ("adapter/adapter_model.safetensors", "value_model/model.safetensors"):
        assert (rounded / file).read_bytes() == (whole / file).read_bytes()


def test_a_run_s_last_policy_is_rounded_and_its_checkpoints_are_not(make_policy, tokenizer, prompts, make_args):
    args = make_args(save_steps=3, export_dtype="bfloat16")
    trainer, _, _ = train(make_policy, tokenizer, prompts, args)
    trainer.save_model(str(Path(args.output_dir).parent / "by hand"))
    own = trainer.model.state_dict()
    for name, dtype in (("checkpoint-6", torch.float32), ("final", torch.bfloat16), ("../by hand", torch.bfloat16)):
        found = AutoModelForCausalLM.from_pretrained(Path(args.output_dir) / name, dtype="auto")
        assert {parameter.dtype for parameter in found.parameters()} == {dtype}
        assert all(torch.equal(tensor, own[key].to(dtype)) for key, tensor in found.named_parameters())


def test_the_learning_rate_follows_optimiser_steps_and_the_last_step_still_learns(
    make_policy, tokenizer, prompts, make_args
):
    rates = []

    class Rates(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer, **kwargs):
            step = optimizer.step

            def recorded(*a, **k):
                rates.append(optimizer.param_groups[0]["lr"])
                return step(*a, **k)

            optimizer.step = recorded

    args = make_args(num_epochs=2, total_episodes=24, num_mini_batches=2, learning_rate=1.0e-3)
    assert args.num_optimizer_steps == 3 * 2 * 2
    train(make_policy, tokenizer, prompts, args, callbacks=[Rates()])
    assert rates == pytest.approx([1e-3 * (12 - step) / 12 for step in range(12)])


def test_bf16_keeps_float32_master_weights(make_policy, tokenizer, prompts, make_args):
    exact = train(make_policy, tokenizer, prompts, make_args("exact", total_episodes=8))
    mixed = train(make_policy, tokenizer, prompts, make_args("mixed", total_episodes=8, bf16=True))
    assert {p.dtype for p in mixed[0].model.parameters()} == {torch.float32}
    assert {t.dtype for s in mixed[0].learner.optimizer.state.values() for t in s.values()} == {torch.float32}
    assert mixed[2][0]["policy/entropy_avg"] == pytest.approx(exact[2][0]["policy/entropy_avg"], rel=0.05)
    assert mixed[2][0]["loss/policy_avg"] != exact[2][0]["loss/policy_avg"]


def test_ties_are_counted_and_teach_nothing(make_policy, tokenizer, prompts, make_args):
    def constant(prompts, completions, **columns):
        return [1.0] * len(completions)

    before = make_policy().state_dict()
    trainer, _, metrics = train(make_policy, tokenizer, prompts, make_args(samples_per_prompt=3), constant)
    assert [m["objective/ties"] for m in metrics] == [8] * 6
    assert [m["optimizer_steps"] for m in metrics] == [0] * 6
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    assert metrics[-1]["lr"] == 0.0  # the schedule went on


def test_the_policy_learns_from_the_best_and_worst_of_four(make_policy, tokenizer, prompts, make_args):
    args = make_args(samples_per_prompt=4, total_episodes=320, learning_rate=3e-3, beta=0.05, staleness=1)
    _, _, metrics = train(make_policy, tokenizer, prompts, args)
    first, last = metrics[:4], metrics[-4:]
    scores = [sum(m["objective/scores"] for m in part) / 4 for part in (first, last)]
    assert scores[1] > scores[0] + 1.0
    assert last[-1]["objective/kl"] > 0.1
    assert all(m["objective/scores_margin"] > 0 for m in metrics)


def test_the_trace_shows_sampling_and_training_side_by_side(make_policy, tokenizer, prompts, make_args):
    args = make_args(staleness=1)
    train(make_policy, tokenizer, prompts, args)
    events = json.loads((Path(args.output_dir) / "trace.json").read_text())
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert set(tracks.values()) == {"learner", "generator 0", "rewards", "reference", "publisher"}
    spans = [(tracks[e["tid"]], e["name"], e["args"].get("batch")) for e in events if e["ph"] == "X"]
    places = {"wait": "learner", "score": "learner", "train": "learner", "generate": "generator 0"}
    for name, track in places.items():
        assert sorted(b for t, n, b in spans if (t, n) == (track, name)) == [1, 2, 3, 4, 5, 6]
    # Version 5 and 6 sample nothing in a run of six batches with one batch of lag, so they are not published.
    published = [e["args"]["version"] for e in events if e["name"] == "publish"]
    assert published == [0, 1, 2, 3, 4]
    generated = {e["args"]["batch"]: e for e in events if e["name"] == "generate"}
    trained = {e["args"]["batch"]: e for e in events if e["name"] == "train"}
    assert all(generated[b]["ts"] < trained[b - 1]["ts"] + trained[b - 1]["dur"] for b in range(3, 7))


@pytest.mark.parametrize("do_sample", [None, True])
def test_the_generation_config_of_a_model_is_kept(tmp_path, make_policy, tokenizer, prompts, make_args, do_sample):
    """Through sft and online training: also one that transformers reads, and refuses to write."""
    write_model(make_policy(), tokenizer, tmp_path / "base")
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [257, 256]}
    given |= {} if do_sample is None else {"do_sample": do_sample}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(given))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    run_sft(SFTConfig(str(tmp_path / "rows.jsonl"), str(tmp_path / "sft"), model=str(tmp_path / "base"), device="cpu"))
    args = make_args("run", total_episodes=8, save_steps=1)
    OnlineTrainer(str(tmp_path / "sft"), args, prompts, reward_funcs=count_letters).train()
    for folder in ("sft", "run/checkpoint-1", "run/final"):
        found = json.loads((tmp_path / folder / "generation_config.json").read_text())
        found.pop("transformers_version")
        assert found == given, folder


def test_what_ends_completions_is_added_to_the_generation_config(tmp_path, make_policy, tokenizer, prompts, make_args):
    policy = make_policy()
    policy.generation_config.eos_token_id = 7
    args = make_args("run", {"stop_token_ids": [9]}, total_episodes=8)
    OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
    found = json.loads((tmp_path / "run" / "final" / "generation_config.json").read_text())
    assert found["eos_token_id"] == [7, 9, 256]


@pytest.mark.parametrize("algorithm", ["dr_grpo", "gspo", "cispo"])
def test_a_trainer_of_grpo_takes_the_configurations_that_derive_from_its_own(
    make_policy, make_args, tokenizer, prompts, algorithm
):
    args = make_args(algorithm=algorithm)
    trainer = GRPOTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    assert trainer.learner.algorithm is find(algorithm)
    with pytest.raises(ConfigError, match="args: got 'RLOOConfig'; must be of type GRPOConfig"):
        GRPOTrainer(make_policy(), make_args(algorithm="rloo"), prompts, reward_funcs=count_letters)


def test_the_error_of_a_completion_without_a_reward_shows_it_as_functions_get_it(
    make_policy, make_args, tokenizer, prompts
):
    def none(prompts, completions, **columns):
        seen.extend(completions)
        return [None] * len(prompts)

    seen: list[str] = []
    args = make_args(generation={"response_length": 4, "stop_token_ids": list(range(250))})
    trainer = OnlineTrainer(make_policy(), args, prompts, reward_funcs=none, processing_class=tokenizer)
    with pytest.raises(RewardError) as error:
        trainer.train()
    assert f"every reward function returned None for completion {seen[0]!r};" in str(error.value)
