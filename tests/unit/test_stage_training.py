"""Supervised stages: passes by tokens, the loss history, and what happens after an end in the middle."""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import in_float64
from safetensors.torch import load_file
from tiny import json_rows, new_policy

from async_rlhf.algorithms.supervised import SFT, response_loss
from async_rlhf.cli import _spelt_out
from async_rlhf.commands import sft as sft_command
from async_rlhf.commands.reward import run_reward
from async_rlhf.commands.sft import run_sft
from async_rlhf.commands.stage import json_lines
from async_rlhf.commands.stage_loop import StageLoop
from async_rlhf.config import AdapterConfig, ConfigError, ParallelConfig, RewardConfig, SFTConfig
from async_rlhf.learner.learner import Learner
from async_rlhf.models import budget
from async_rlhf.models.loading import load_policy
from async_rlhf.models.saving import write_model
from async_rlhf.run.manifest import write_whole
from async_rlhf.types import LossOutput

TEXTS = [{"query": f"q{i}:", "query_reference_response": f"q{i}:{'ab' * (i % 9)} {i % 7}"} for i in range(40)]
PAIRS = [{"prompt": f"p{i}", "chosen": f" good{'d' * (i % 6)}", "rejected": f" bad{'x' * (i % 4)}"} for i in range(40)]


@pytest.fixture
def sft(tmp_path, tokenizer) -> SFTConfig:
    """Two epochs of five steps."""
    write_model(new_policy(), tokenizer, tmp_path / "base")
    (tmp_path / "texts.jsonl").write_text(json_lines(TEXTS))
    return SFTConfig(
        train=str(tmp_path / "texts.jsonl"),
        output_dir=str(tmp_path / "whole"),
        model=str(tmp_path / "base"),
        eval=str(tmp_path / "texts.jsonl"),
        num_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=2,
        eval_steps=4,
        weight_decay=0.1,
    )


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def same_weights(one: str | Path, other: str | Path) -> bool:
    """Bit for bit."""
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], tensor) for name, tensor in right.items())


def history(folder: str | Path) -> list[dict]:
    return json_rows(Path(folder) / "metrics.jsonl")


class Killed(BaseException):
    """In place of kill -9: nothing cleans up."""


def stop_after(step: int, patch: pytest.MonkeyPatch, written: bool = True) -> None:
    """End the process, as it were, after the checkpoint of that step, or in the middle of writing it."""
    real = StageLoop.save

    def save(loop):
        number = loop.run.callbacks.state.global_step
        if number == step and not written:
            half = loop.run.folder.path / f".checkpoint-{number}.tmp"
            half.mkdir()
            (half / "state.json").write_text("{")
            raise Killed
        real(loop)
        if number == step:
            raise Killed

    patch.setattr(StageLoop, "save", save)


def interrupted(run, config, step: int, written: bool = True) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(step, patch, written)
        with pytest.raises(Killed):
            run(config)
    gc.collect()  # a process that has ended holds no lock
    assert not Path(config.output_dir).exists()


def _times(found: LossOutput, factor: float | torch.Tensor) -> LossOutput:
    return replace(found, loss_sum=found.loss_sum * factor)


@pytest.mark.parametrize("adapters", [0, 2])
def test_a_resumed_stage_is_the_uninterrupted_one(sft, tmp_path, monkeypatch, adapters):
    """Bit for bit: weights, results, and every line of the loss history; after two ends, once in the middle of
    writing a checkpoint, and after more lines than the checkpoint knows. The model draws random numbers in each pass.
    """
    noisy = replace(SFT, loss=lambda *args: _times(response_loss(*args), 1 + torch.rand(()) / 2))
    monkeypatch.setattr(sft_command, "SFT", noisy)
    sft = replace(sft, lora=AdapterConfig(adapters), lr_scheduler_type="cosine", save_steps=3, logging_steps=4)
    whole = run_sft(sft)
    cut = replace(sft, output_dir=str(tmp_path / "cut"), resume=True)
    interrupted(run_sft, cut, 6)
    place = tmp_path / ".cut.unfinished"
    assert [path.name for path in place.glob("checkpoint-*")] == ["checkpoint-6"]
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7}\n')
    interrupted(run_sft, cut, 9, written=False)
    assert run_sft(cut) == whole
    assert history(cut.output_dir) == history(sft.output_dir)
    assert same_weights(cut.output_dir, sft.output_dir)
    assert not place.exists()


@pytest.mark.parametrize("adapters", [0, 2])
def test_a_reward_model_is_resumed_too(sft, tmp_path, adapters):
    (tmp_path / "pairs.jsonl").write_text(json_lines(PAIRS))
    sizes = {"per_device_train_batch_size": 4, "num_epochs": 2, "save_steps": 5, "lora": AdapterConfig(adapters)}
    config = RewardConfig(str(tmp_path / "pairs.jsonl"), str(tmp_path / "r"), model=str(tmp_path / "base"), **sizes)
    whole = run_reward(config)
    cut = replace(config, output_dir=str(tmp_path / "cut"), resume=True)
    interrupted(run_reward, cut, 10)
    assert run_reward(cut) == whole
    assert same_weights(cut.output_dir, config.output_dir)
    assert whole["score_offset"] != 0


def test_what_is_unfinished_is_neither_lost_nor_taken_for_another(sft, tmp_path, caplog):
    cut = replace(sft, output_dir=str(tmp_path / "cut"), save_steps=3)
    interrupted(run_sft, cut, 3)
    with pytest.raises(
        ConfigError, match=r"'.*cut' is unfinished, with checkpoint-3 in .*; set resume .* or overwrite"
    ):
        run_sft(cut)
    resumed = replace(cut, resume=True)
    with pytest.raises(ConfigError, match=r"another run, .*:\n  learning_rate: was 0\.001, is 0\.01\n"):
        run_sft(replace(resumed, learning_rate=0.01))
    (tmp_path / "more.jsonl").write_text(json_lines(TEXTS[:30]))
    with pytest.raises(ConfigError, match=r"another run, .*:\n  inputs\.train: was 'xxh3"):
        run_sft(replace(resumed, train=str(tmp_path / "more.jsonl")))
    (place,) = (tmp_path / ".cut.unfinished").glob("checkpoint-*")
    tensors = place / "model.safetensors"
    before = tensors.read_bytes()
    tensors.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    right = r"resume: checkpoint-3 in '.*' is damaged, and there is no other; set overwrite"
    with pytest.raises(ConfigError, match=right):
        run_sft(resumed)
    assert "checkpoint-3 is damaged and is passed over" in caplog.text
    run_sft(replace(resumed, overwrite=True))  # from the beginning
    assert [line["step"] for line in history(cut.output_dir) if "loss" in line] == [2, 4, 6, 8, 10]
    interrupted(run_sft, replace(cut, output_dir=str(tmp_path / "again")), 3)
    run_sft(replace(cut, output_dir=str(tmp_path / "again"), overwrite=True))
    assert same_weights(tmp_path / "again", tmp_path / "cut")


def test_keys_that_change_no_weight_may_change_on_resume(sft, tmp_path):
    run_sft(sft)
    cut = replace(sft, output_dir=str(tmp_path / "cut"), save_steps=3)
    interrupted(run_sft, cut, 6)
    run_sft(replace(cut, resume=True, save_steps=4, logging_steps=5, eval_steps=0))
    assert same_weights(tmp_path / "cut", tmp_path / "whole")


def test_a_stage_s_model_may_be_written_in_bfloat16(sft, tmp_path):
    run_sft(sft)
    run_sft(replace(sft, output_dir=str(tmp_path / "half"), export_dtype="bfloat16"))
    whole, half = weights(tmp_path / "whole"), weights(tmp_path / "half")
    assert whole.keys() == half.keys()
    assert all(torch.equal(tensor.to(torch.bfloat16), half[name]) for name, tensor in whole.items())


def test_a_signal_saves_and_ends_and_an_older_format_is_refused(sft, tmp_path, monkeypatch):
    """SIGTERM in the third step, without save_steps."""
    whole = run_sft(sft)
    steps = []

    def ended(*args):
        steps.append(1)
        if len(steps) == 5:  # of two passes a step
            os.kill(os.getpid(), signal.SIGTERM)
        return response_loss(*args)

    cut = replace(sft, output_dir=str(tmp_path / "cut"))
    with monkeypatch.context() as patch:
        patch.setattr(sft_command, "SFT", replace(SFT, loss=ended))
        with pytest.raises(SystemExit) as end:
            run_sft(cut)
    assert end.value.code == 0
    (place,) = (tmp_path / ".cut.unfinished").glob("checkpoint-*")
    assert place.name == "checkpoint-3"
    load_policy(str(place))  # as any model
    gc.collect()
    older = place.with_name("checkpoint-4")
    write_whole(older, [lambda folder: (folder / "state.json").write_text('{"format": 1}')])
    with pytest.raises(
        ConfigError, match=r"resume: '.*checkpoint-4' is a stage's checkpoint of an older format; go on"
    ):
        run_sft(replace(cut, resume=True))
    shutil.rmtree(older)
    assert run_sft(replace(cut, resume=True)) == whole
    assert same_weights(cut.output_dir, sft.output_dir)


def test_no_checkpoint_is_written_that_is_deleted_at_once(sft, monkeypatch):
    """Ten steps: one after the fifth, none after the last."""
    saved = []
    monkeypatch.setattr(StageLoop, "save", lambda loop: saved.append(loop.run.callbacks.state.global_step))
    run_sft(replace(sft, save_steps=5))
    assert saved == [5]


def test_a_gradient_that_is_not_finite_ends_the_stage(sft, monkeypatch):
    monkeypatch.setattr(sft_command, "SFT", replace(SFT, loss=lambda *args: _times(response_loss(*args), math.nan)))
    with pytest.raises(FloatingPointError, match=r"step 1: .* is nan; the weights .*; lower learning_rate \(0\.001\)"):
        run_sft(sft)


def test_the_loss_history(sft, tmp_path):
    results = run_sft(sft)
    lines = history(sft.output_dir)
    losses = [line for line in lines if "loss" in line]
    assert [line["step"] for line in losses] == [2, 4, 6, 8, 10]
    assert all(line.keys() == {"step", "epoch", "loss", "grad_norm", "lr", "tokens"} for line in losses)
    assert sum(line["loss"] for line in losses) / 5 == pytest.approx(results["train_loss"], rel=1e-12)
    assert [line["epoch"] for line in losses] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert losses[-1]["tokens"] == 2 * sum(len(row["query_reference_response"]) + 1 for row in TEXTS)
    rates = [line["lr"] for line in losses]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(1e-3 * 9 / 9)  # the second step, after a warm-up of one
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 10]
    assert lines[-1]["eval_loss"] == results["eval_loss"]


@pytest.mark.parametrize("tokens", [1, 30, "auto"])
def test_tokens_limit_passes_and_change_no_weight(sft, tmp_path, monkeypatch, tokens):
    sft = replace(sft, model=None, new_model=replace(sft.new_model, vocab_size=300, hidden_size=16, num_layers=1))
    sft = replace(sft, bf16=False, learning_rate=1e-2, num_epochs=1)
    monkeypatch.setattr(Learner, "_optimizer", lambda self, own: torch.optim.SGD(self.model.parameters(), 0.1))
    with in_float64():
        run_sft(sft)
    seen = []

    def counted(output, rows, config):
        seen.append(rows)
        return response_loss(output, rows, config)

    monkeypatch.setattr(sft_command, "SFT", replace(SFT, loss=counted))
    limited = replace(sft, output_dir=str(tmp_path / "limited"), max_tokens_per_pass=tokens)
    with in_float64():
        results = run_sft(limited)
    most = {1: 1, 30: 30, "auto": 2048}[tokens]
    assert all(rows.lengths_B.sum() <= most or len(rows) == 1 for rows in seen)
    assert {1: len(seen) == 40, 30: 5 < len(seen) < 40, "auto": len(seen) == 5}[tokens]
    for name, tensor in weights(sft.output_dir).items():
        assert torch.allclose(weights(limited.output_dir)[name], tensor, rtol=0, atol=1e-12), name
    ours, theirs = history(limited.output_dir), history(sft.output_dir)
    assert [line["loss"] for line in ours[:2]] == pytest.approx([line["loss"] for line in theirs[:2]], rel=1e-12)
    assert results["rows"] == 40


def test_tokens_that_fit_stay_what_they_were_when_the_stage_began(sft, tmp_path, monkeypatch):
    sft = replace(sft, max_tokens_per_pass="auto", save_steps=3)
    monkeypatch.setitem(budget._ON_CPU, "max_tokens_per_pass", 30)
    whole = run_sft(sft)
    cut = replace(sft, output_dir=str(tmp_path / "cut"), resume=True)
    interrupted(run_sft, cut, 6)
    monkeypatch.setitem(budget._ON_CPU, "max_tokens_per_pass", 2048)
    assert run_sft(cut) == whole
    assert history(cut.output_dir) == history(sft.output_dir)
    assert same_weights(cut.output_dir, sft.output_dir)
    assert run_sft(cut) == whole  # it is done, by the keys that were asked for


def test_ranks_that_were_not_launched_are_refused_before_anything_is_read(tmp_path):
    config = SFTConfig("nowhere.jsonl", str(tmp_path / "sft"), parallel=ParallelConfig(ranks=2))
    right = r"parallel\.ranks: got 2; start the command with torchrun .* -m async_rlhf\.cli sft"
    with pytest.raises(ConfigError, match=right):
        run_sft(config)
    with pytest.raises(
        ConfigError, match=r"device: got 'cuda:1'; must be null, \"cpu\" or \"cuda\" with parallel.ranks"
    ):
        replace(config, device="cuda:1")


def test_resume_is_a_flag():
    assert _spelt_out("sft", ["--resume", "--train", "d"]) == ["--resume=true", "--train", "d"]
    assert _spelt_out("reward", ["--resume", "false"]) == ["--resume", "false"]
    assert _spelt_out("sft", ["--resume-anyway"]) == ["--resume_anyway=true"]


def test_what_others_have_put_beside_is_kept(sft, tmp_path, caplog):
    place = tmp_path / ".whole.unfinished"
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    run_sft(sft)
    assert [path.name for path in place.iterdir()] == ["thesis.txt"]
    assert "thesis.txt was not written by a stage" in caplog.text
    shutil.rmtree(place)
