"""float16 with loss scaling: what overflows is skipped and said, nothing else changes, and a resumed run is exact."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import count_letters, rare
from torch import nn

from async_rlhf.config import ConfigError
from async_rlhf.distributed import loss_scale
from async_rlhf.distributed.loss_scale import LossScale
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.run.trainer import OnlineTrainer


def train(make_policy, tokenizer, prompts, args, **options) -> list[dict[str, float]]:
    policy = make_policy()
    OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer, **options).train()
    lines = map(json.loads, Path(args.output_dir, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "optimizer_steps" in line]


def final(args) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(args.output_dir) / "final" / "model.safetensors")


@pytest.mark.parametrize(
    ("algorithm", "staleness"),
    [("online_dpo", 0), rare("online_dpo", 1), rare("rloo", 0), ("rloo", 1), ("ppo", 0), rare("ppo", 1)],
)
def test_a_run_in_float16_is_near_the_one_in_float32(
    make_policy, make_reward_model, tokenizer, prompts, make_args, algorithm, staleness, monkeypatch
):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**6)  # the gradients of so small and wide a model are large
    options, runs = {"reward_model": make_reward_model()}, {}
    for kind in ("float32", "fp16"):
        always = {"mismatch_steps": 1}
        args = make_args(kind, always, algorithm=algorithm, staleness=staleness, fp16=kind == "fp16")
        runs[kind] = train(make_policy, tokenizer, prompts, args, **options)
    assert "loss_scale" not in runs["float32"][0]
    for line in runs["fp16"]:
        assert (line["loss_scale"], line["skipped_steps"], line["optimizer_steps"]) == (2.0**6, 0.0, 2.0)
        assert math.isfinite(line["grad_norm"])
        assert 0 <= line["engine/logprob_difference"] < 0.05
    first, other = runs["fp16"][0], runs["float32"][0]
    assert first["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.2)
    assert first["grad_norm"] != other["grad_norm"]


def test_what_overflows_is_skipped_and_said_and_the_scale_comes_down(
    make_policy, tokenizer, prompts, make_args, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**26)
    args = make_args(fp16=True)
    lines = train(make_policy, tokenizer, prompts, args)
    skipped = [line["skipped_steps"] for line in lines]
    assert skipped[0] == 2.0
    assert lines[0]["optimizer_steps"] == 0.0
    assert skipped[-1] == 0.0
    assert [line["skipped_steps"] + line["optimizer_steps"] for line in lines] == [2.0] * len(lines)
    assert lines[-1]["loss_scale"] == 2.0 ** (26 - sum(skipped))
    assert caplog.text.count("its step is skipped, the loss scale is now") == sum(skipped)
    assert all(math.isfinite(line["grad_norm"]) for line in lines)


def test_a_skipped_step_leaves_the_weights_as_they_are(make_policy, tokenizer, prompts, make_args, monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**32)
    args = make_args(fp16=True, total_episodes=8)
    (line,) = train(make_policy, tokenizer, prompts, args)
    assert (line["skipped_steps"], line["loss_scale"]) == (2.0, 2.0**30)
    before = {name.replace("lm_head", "embed_out"): tensor for name, tensor in make_policy().state_dict().items()}
    for name, tensor in final(args).items():
        assert torch.equal(tensor, before[name]), name


def test_a_resumed_run_goes_on_with_the_scale_it_had(make_policy, tokenizer, prompts, make_args, monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**26)
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    whole = train(make_policy, tokenizer, prompts, make_args("whole", fp16=True, save_steps=2))
    assert len({line["loss_scale"] for line in whole}) > 2
    for batch in (2, 4):
        args = make_args(f"from {batch}", fp16=True, resume_from=f"{make_args('whole').output_dir}/checkpoint-{batch}")
        resumed = train(make_policy, tokenizer, prompts, args)
        names = ("loss_scale", "skipped_steps", "optimizer_steps", "grad_norm", "loss/policy_avg", "objective/scores")
        found = [{name: line[name] for name in names if name in line} for line in resumed]
        assert found == [{name: line[name] for name in names if name in line} for line in whole[batch:]]
        for name, tensor in final(args).items():
            assert torch.equal(tensor, final(make_args("whole"))[name]), name


def test_a_power_of_two_rounds_nothing():
    """Where nothing over- or underflows, the weights are those without scaling, bit for bit."""
    found = []
    for scale in (None, LossScale()):
        torch.manual_seed(0)
        model, parallel = nn.Linear(7, 5), Parallel()
        parallel.loss_scale = scale
        parallel.prepare(model, [model], lambda model=model: torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(4):
            parallel.backward(model(torch.randn(3, 7)).square().sum())
            assert parallel.step(0.5) is not None
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_the_scale_doubles_after_many_steps_and_halves_at_an_overflow(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    scale, values = LossScale(), []
    for norm in (1.0, 2.0, math.inf, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0):
        assert scale.overflowed([1.0, norm]) == (not math.isfinite(norm))
        values.append(math.log2(scale.value))
    assert values == [16, 16, 15, 15, 15, 16, 16, 15, 15]
    other = LossScale()
    other.restore(json.loads(json.dumps(scale.state())))
    assert other.state() == scale.state() == [2.0**15, 1]
    other.restore([1.0, 0])
    with pytest.raises(FloatingPointError, match="not finite in float16, even with a loss scale of 1"):
        other.overflowed([math.nan])


def test_one_type_at_a_time(make_args):
    with pytest.raises(ConfigError, match="fp16: got True; must be false with bf16"):
        make_args(fp16=True, bf16=True)
    assert make_args(fp16=True, head_float32=True).head_float32
