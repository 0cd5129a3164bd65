"""QLoRA: the weights below the adapters lie in 4 bits, and everyone else gets what they stand for."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import torch
from tiny import count_letters, json_rows
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from async_rlhf import GRPOTrainer, KLConfig, LoRAConfig
from async_rlhf.config import ConfigError, ParallelConfig
from async_rlhf.models.adapters import write_base
from async_rlhf.models.loading import load_in_four_bits, load_policy
from async_rlhf.models.publish import SnapshotRing
from async_rlhf.models.quantised import keep_format
from async_rlhf.models.saving import write_model
from async_rlhf.models.weights import named_weights

needs_it = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="pip install 'async-rlhf[quantized]'")
CPU = torch.device("cpu")
TOKENS_BT = torch.arange(3, 33).view(3, 10)
SIZES = {**tiny.LLAMA_SIZES, "hidden_size": 128, "intermediate_size": 256}  # larger than a block of 4-bit weights
QLORA = LoRAConfig(rank=4, alpha=8.0, base_bits=4)


@pytest.fixture
def base(tmp_path, tokenizer) -> str:
    """The folder of a policy."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=258, eos_token_id=256, pad_token_id=257)
    write_model(LlamaForCausalLM(config), tokenizer, tmp_path / "base")
    return str(tmp_path / "base")


def new_trainer(model, prompts, make_args, **changes) -> GRPOTrainer:
    args = make_args(
        algorithm="grpo", samples_per_prompt=2, total_episodes=24, kl=KLConfig(coef=0.02), **{"lora": QLORA, **changes}
    )
    return GRPOTrainer(model, args, prompts, reward_funcs=count_letters)


@needs_it
def test_linear_layers_take_four_bits_and_stay_close(base):
    whole, small = load_policy(base), load_in_four_bits(base, CPU, torch.float32)
    assert type(small.lm_head) is nn.Linear
    assert torch.equal(small.lm_head.weight, whole.lm_head.weight)
    layers = [name for name, module in whole.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    assert layers
    for name in layers:
        held = small.get_submodule(name).weight
        assert held.numel() * held.element_size() * 8 == whole.get_submodule(name).weight.numel() * 4
    with torch.no_grad():
        expected = whole(TOKENS_BT).logits
        error = (small.train()(TOKENS_BT).logits - expected).norm() / expected.norm()
    assert 0 < error < 0.25
    named = named_weights(small)
    assert {name: t.shape for name, t in named.items()} == {name: t.shape for name, t in named_weights(whole).items()}
    assert all(tensor.dtype == torch.float32 for tensor in named.values())


@needs_it
def test_what_others_get_computes_the_same(base, tokenizer, tmp_path):
    """Snapshots, the base that adapters are applied to, and a saved model."""
    small = load_in_four_bits(base, CPU, torch.float32).train()
    with torch.no_grad():
        expected = small(TOKENS_BT).logits
    ring = SnapshotRing.for_model(small, torch.float32, 1)
    ring.publish(small, 0)
    plain = load_policy(base)
    plain.load_state_dict({**plain.state_dict(), **ring.views(0)})
    write_base(small, tmp_path / "below", torch.float32)
    write_model(small, tokenizer, tmp_path / "saved")
    for model in (plain, load_policy(str(tmp_path / "below")), load_policy(str(tmp_path / "saved"))):
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS_BT).logits, expected, rtol=1e-4, atol=1e-4)


@needs_it
def test_sampling_leaves_the_weights_as_training_needs_them(base):
    """On some CPUs bitsandbytes packs them otherwise when they first compute without gradient."""
    small = load_in_four_bits(base, CPU, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in named_weights(small).items()}
    layers = [module for module in small.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    assert layers
    for layer in layers:
        assert layer.support_avx512bf16_for_cpu is False
        del layer.support_avx512bf16_for_cpu
        layer.support_avx512bf16_for_cpu = True
    keep_format(small)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        small.eval()(TOKENS_BT)
    for name, tensor in named_weights(small).items():
        assert torch.equal(tensor, before[name]), name


@needs_it
@pytest.mark.parametrize("placement", ["process", "inline"])
def test_a_run_trains_adapters_alone_and_generators_sample_as_the_learner_would(base, prompts, make_args, placement):
    staleness = 1 if placement == "process" else 0
    trainer = new_trainer(base, prompts, make_args, generation={"placement": placement}, staleness=staleness)
    before = {n: p.clone() for n, p in trainer.learner.policy.named_parameters() if "lora_" not in n}
    trainer.train()
    policy = trainer.learner.policy
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == {
        name for name, _ in policy.named_parameters() if "lora_" in name
    }
    for name, parameter in policy.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name]), name
    assert sum(p.dtype == torch.uint8 for p in policy.parameters()) == 7 * SIZES["num_hidden_layers"]
    folder = Path(trainer.args.output_dir)
    lines = json_rows(folder / "metrics.jsonl")
    assert [line["schedule/lag"] for line in lines] == ([0, 1, 1] if staleness else [0, 0, 0])
    assert all(line["engine/logprob_difference_max"] < 1e-4 for line in lines)
    assert abs(lines[0]["objective/kl"]) < 1e-4 < abs(lines[2]["objective/kl"])
    with torch.no_grad():
        expected = policy(TOKENS_BT).logits
        loaded = AutoModelForCausalLM.from_pretrained(folder / "final")
        torch.testing.assert_close(loaded(TOKENS_BT).logits, expected, rtol=1e-4, atol=1e-4)


@needs_it
def test_a_resumed_run_is_the_same_run(base, prompts, make_args):
    whole = new_trainer(base, prompts, make_args, save_steps=1)
    whole.train()
    found = {name: tensor.clone() for name, tensor in named_weights(whole.learner.policy).items()}
    checkpoint = Path(whole.args.output_dir) / "checkpoint-1"
    args = replace(whole.args, resume_from=str(checkpoint), output_dir=f"{whole.args.output_dir}-again")
    again = GRPOTrainer(base, args, prompts, reward_funcs=count_letters)
    again.train()
    for name, tensor in named_weights(again.learner.policy).items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "base_bits: got 4; must be null with rank 0"),
        (
            {"rank": 2, "parallel": ParallelConfig(strategy="fsdp", ranks=2)},
            "lora.base_bits: got 4; must be null with weights spread over ranks",
        ),
    ],
)
def test_what_cannot_be_is_refused(make_args, changes, message):
    changes = dict(changes)
    with pytest.raises(ConfigError) as caught:
        make_args(lora=LoRAConfig(rank=changes.pop("rank", 0), base_bits=4), **changes)
    assert message in str(caught.value)


def test_a_model_that_is_loaded_already_and_a_missing_package_are_refused(make_policy, prompts, make_args, monkeypatch):
    with pytest.raises(ConfigError, match=r"lora\.base_bits: got 4; must be null with a model that is loaded already"):
        new_trainer(make_policy(), prompts, make_args)
    monkeypatch.setattr("async_rlhf.models.quantised.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora\.base_bits: got 4; needs bitsandbytes: pip install"):
        new_trainer("any", prompts, make_args)
