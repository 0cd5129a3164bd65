"""What models and optimisers hold: fewer bytes change nothing that is computed, or only what is said."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from tiny import LLAMA_SIZES, count_letters, new_args
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from async_rlhf.config import ConfigError, ParallelConfig
from async_rlhf.distributed.parallel import Parallel, decayed_groups, trainable
from async_rlhf.learner.optimizers import Together, make_optimizer
from async_rlhf.models import frozen_models
from async_rlhf.models.forward import advise_sixteen_bits, response_logprobs, reward_scores
from async_rlhf.models.frozen_models import HostCopy, hold_all, hold_linear
from async_rlhf.models.kernels import blocks, compile_blocks
from async_rlhf.run.checkpoint import learner_state, restore_learner
from async_rlhf.run.trainer import OnlineTrainer

BF16 = torch.bfloat16


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA_SIZES, "vocab_size": 258, **changes})).eval()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    tokens_BT = torch.randint(0, 250, (3, 12), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.zeros(3, 12)
    mask_BT[:, 4:] = 1
    return tokens_BT, mask_BT


def metrics_of(args) -> list[dict[str, float]]:
    lines = map(json.loads, Path(args.output_dir, "metrics.jsonl").read_text().splitlines())
    return [{name: x for name, x in line.items() if name != "eps" and not name.startswith("time/")} for line in lines]


def train(make_policy, tokenizer, prompts, args, **options):
    trainer = OnlineTrainer(
        make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer, **options
    )
    trainer.train()
    return trainer, metrics_of(args)


# Frozen models


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_float32", [False, True])
def test_a_frozen_policy_in_bfloat16_computes_the_same_bit_for_bit(tied, head_float32):
    tokens_BT, mask_BT = rows()
    found, held = {}, {}
    for kind in ("float32", "bfloat16"):
        model = llama(tie_word_embeddings=tied)
        if kind == "bfloat16":
            hold_linear(model, BF16, head_float32)
        if head_float32:
            from async_rlhf.models.forward import head_in_float32

            head_in_float32(model)
        with torch.no_grad(), torch.autocast("cpu", BF16):
            found[kind] = response_logprobs(model, tokens_BT, mask_BT, 0.7).logprobs_BT
        held[kind] = {name: p.dtype for name, p in model.named_parameters()}
    assert torch.equal(found["float32"], found["bfloat16"])
    assert set(held["float32"].values()) == {torch.float32}
    halved = {name for name, dtype in held["bfloat16"].items() if dtype == BF16}
    in_body = {name for name in held["bfloat16"] if "proj" in name}
    assert halved == (in_body if tied or head_float32 else in_body | {"lm_head.weight"})


@pytest.mark.parametrize("frozen", [False, True])
def test_experts_compute_in_the_type_of_autocast(frozen, monkeypatch):
    """As FSDP's do, whose weights are cast before; those that are trained have float32 gradients."""
    torch.manual_seed(0)
    sizes = LLAMA_SIZES | {"vocab_size": 258, "num_local_experts": 4, "num_experts_per_tok": 2}
    models = [MixtralForCausalLM(MixtralConfig(**sizes)).eval()]
    models.append(copy.deepcopy(models[0]))
    experts = [[p for p in model.parameters() if p.dim() == 3] for model in models]
    for weight in experts[1]:
        weight.data = weight.data.bfloat16()
    if frozen:
        hold_linear(models[0], BF16, head_float32=False)
    computed, product = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional,
        "grouped_mm",
        lambda x, weight, **how: computed.append((x.dtype, weight.dtype)) or product(x, weight, **how),
    )
    tokens_BT, mask_BT = rows()
    with torch.autocast("cpu", BF16):
        found, right = (response_logprobs(model, tokens_BT, mask_BT, 0.7).logprobs_BT for model in models)
    assert torch.equal(found, right)
    assert len(computed) == 2 * len(experts[0])
    assert set(computed) == {(BF16, BF16)}
    assert {p.dtype for p in models[0].parameters() if p.dim() == 3} == {BF16 if frozen else torch.float32}
    if not frozen:
        found.sum().backward()
        right.sum().backward()
        assert all(torch.equal(a.grad, b.grad.float()) for a, b in zip(*experts, strict=True))


def test_a_reward_model_in_bfloat16_scores_the_same_bit_for_bit_and_keeps_its_head(make_reward_model):
    tokens_BT, lengths_B, found = rows()[0], torch.tensor([12, 9, 5]), {}
    for kind in ("float32", "bfloat16"):
        model = make_reward_model()
        if kind == "bfloat16":
            hold_linear(model, BF16, head_float32=False)
            assert model.score.weight.dtype == torch.float32
            assert model.gpt_neox.layers[0].mlp.dense_h_to_4h.bias.dtype == BF16
        with torch.no_grad(), torch.autocast("cpu", BF16):
            found[kind] = reward_scores(model, tokens_BT, lengths_B)
    assert torch.equal(found["float32"], found["bfloat16"])


@pytest.mark.parametrize("head_float32", [False, True])
def test_weights_that_are_cast_when_they_are_gathered_are_all_held_so(make_reward_model, head_float32):
    policy, reward = llama(), make_reward_model()
    hold_all(policy, BF16, head_float32)
    hold_all(reward, BF16, head_float32)
    outside = {name for name, p in policy.named_parameters() if p.dtype == torch.float32}
    assert outside == ({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} if head_float32 else set())
    assert {name for name, p in reward.named_parameters() if p.dtype == torch.float32} == {"score.weight"}


def test_a_run_with_frozen_models_in_fewer_bytes_is_the_same_bit_for_bit(
    make_policy, make_reward_model, tokenizer, prompts, make_args, monkeypatch
):
    found = {}
    for kind in ("fewer", "float32"):
        if kind == "float32":
            monkeypatch.setattr(frozen_models, "hold_linear", lambda *_: None)
        args = make_args(kind, bf16=True, total_episodes=16)
        trainer, found[kind] = train(make_policy, tokenizer, prompts, args, reward_model=make_reward_model())
        linear = trainer.run.learner.reference.model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight
        assert linear.dtype == (BF16 if kind == "fewer" else torch.float32)
    assert found["fewer"] == found["float32"]


def test_a_host_copy_leaves_the_device_and_comes_back_unchanged():
    model = llama()
    before = {name: p.clone() for name, p in model.named_parameters()}
    copy = HostCopy(model)
    for _ in range(2):
        with copy:
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# Optimisers


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adafactor", "muon"])
def test_an_optimiser_of_another_name_trains_and_resumes_bit_for_bit(make_policy, tokenizer, prompts, make_args, name):
    if name.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    same = {"optimizer": name, "save_steps": 2, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    _, whole = train(make_policy, tokenizer, prompts, make_args("whole", total_episodes=32, **same))
    train(make_policy, tokenizer, prompts, make_args("parts", total_episodes=16, **same))
    _, parts = train(make_policy, tokenizer, prompts, make_args("parts", total_episodes=32, resume=True, **same))
    assert len(whole) == 4
    assert [line["loss/policy_avg"] for line in parts] == [line["loss/policy_avg"] for line in whole]
    assert [line["grad_norm"] for line in parts] == [line["grad_norm"] for line in whole]
    _, usual = train(
        make_policy, tokenizer, prompts, make_args("usual", total_episodes=32, **same | {"optimizer": "adamw"})
    )
    assert usual[-1]["loss/policy_avg"] != whole[-1]["loss/policy_avg"]


def test_a_checkpoint_of_smaller_steps_is_not_gone_on_with(make_policy, tokenizer, prompts, make_args):
    args = make_args("run", total_episodes=16, save_steps=1, optimizer="adafactor")
    trainer, _ = train(make_policy, tokenizer, prompts, args)
    tensors, values = learner_state(trainer.learner)
    restore_learner(trainer.learner, tensors, values)
    del values["adafactor_steps"]
    with pytest.raises(ConfigError, match=r"^resume: the checkpoint is of a version whose adafactor multiplied"):
        restore_learner(trainer.learner, tensors, values)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_one_learning_rate_suits_every_optimiser(make_policy, make_args, name):
    """At the weights of a trained model, whose RMS is 0.02, no matrix moves ten times less or more than by AdamW."""
    moved = {}
    for kind in ("adamw", name):
        torch.manual_seed(0)
        policy = make_policy()
        for parameter in policy.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        before = {key: p.detach().clone() for key, p in policy.named_parameters()}
        groups = decayed_groups(trainable(policy), 1e-3, 0.0)
        optimizer = make_optimizer(make_args(kind, optimizer=kind, learning_rate=1e-3), groups, blocks(policy))
        for _ in range(5):
            policy(input_ids=torch.arange(48).view(2, 24), labels=torch.arange(1, 49).view(2, 24)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        moved[kind] = {key: (p - before[key]).norm().item() for key, p in policy.named_parameters() if p.dim() > 1}
    ratios = [moved[name][key] / size for key, size in moved["adamw"].items() if size > 0]
    assert min(ratios) > 0.1
    assert max(ratios) < 10


@pytest.mark.parametrize("shared_trunk", [False, True])
def test_muon_is_for_the_matrices_of_the_blocks(make_policy, tokenizer, prompts, make_args, shared_trunk):
    """Of the policy and of the value model; not for embeddings, heads and vectors."""
    args = make_args(algorithm="ppo", optimizer="muon", total_episodes=8, shared_trunk=shared_trunk)
    trainer, _ = train(make_policy, tokenizer, prompts, args)
    learner = trainer.run.learner
    assert isinstance(learner.optimizer, Together)
    names = {id(p): name for name, p in learner.model.named_parameters()}
    muon, adam = (
        {names[id(p)] for group in part.param_groups for p in group["params"]} for part in learner.optimizer.parts
    )
    matrices = ("query_key_value.weight", "attention.dense.weight", "h_to_4h.weight", "4h_to_h.weight")
    assert muon == {name for name in names.values() if name.endswith(matrices)}
    assert len({name.split(".")[0] for name in muon}) == (1 if shared_trunk else 2)
    assert muon | adam == set(names.values())
    rates = {group["lr"] for part in learner.optimizer.parts for group in part.param_groups}
    assert rates == {group["lr"] for group in learner.optimizer.param_groups}


def test_several_optimisers_as_one_take_the_steps_that_each_would_take():
    def made() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        parts = [torch.optim.SGD([layer.weight], lr=0.1, momentum=0.9), torch.optim.AdamW([layer.bias], lr=0.2)]
        return layer, Together(parts)

    def steps(layer, optimizers, count):
        for _ in range(count):
            layer(torch.arange(4.0)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            layer.zero_grad()

    one, together = made()
    two, apart = made()
    steps(one, [together], 3)
    steps(two, apart.parts, 3)
    assert torch.equal(one.weight, two.weight)
    assert torch.equal(one.bias, two.bias)
    three, loaded = made()
    three.load_state_dict(one.state_dict())
    loaded.load_state_dict(copy.deepcopy(together.state_dict()))
    loaded.param_groups[0]["lr"] = together.param_groups[0]["lr"] = 0.3
    steps(one, [together], 2)
    steps(three, [loaded], 2)
    assert torch.equal(one.weight, three.weight)
    assert torch.equal(one.bias, three.bias)


def test_an_optimiser_that_cannot_be_is_refused_before_any_model_is_loaded(tokenizer, prompts, make_args, monkeypatch):
    def build(args, **options):
        trainer = OnlineTrainer(
            "no/model", args, prompts, reward_funcs=count_letters, processing_class=tokenizer, **options
        )
        trainer.train()

    monkeypatch.setattr("async_rlhf.run.build.with_prompt_cap", lambda config, _: config)
    monkeypatch.setattr("async_rlhf.models.quantised.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"optimizer: got 'adamw_8bit'; needs bitsandbytes: .*async-rlhf\[quantized\]"
    ):
        build(make_args(optimizer="adamw_8bit"))
    monkeypatch.setattr(Parallel, "takes_optimizers", False)
    with pytest.raises(ConfigError, match=r"optimizer: got 'muon'; must be \"adamw\" but on one rank or with"):
        build(make_args(optimizer="muon"))
    own = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match=r"optimizer: got 'muon'; must be left out with an optimiser in optimizers"):
        build(make_args(optimizer="muon"), optimizers=(own, None))
    with pytest.raises(ConfigError, match=r'offload_frozen: got True; must be false with parallel.strategy "zero3"'):
        make_args(offload_frozen=True, parallel=ParallelConfig(strategy="zero3", ranks=2))
    with pytest.raises(ConfigError, match=r'adam_beta1: got 0.5; must be left out with optimizer "adafactor"'):
        make_args(optimizer="adafactor", adam_beta1=0.5)


# Kernels


def test_the_attention_that_is_named_is_used_by_every_model(
    make_policy, make_reward_model, tokenizer, prompts, make_args
):
    args = make_args(algorithm="ppo", attn_implementation="eager", total_episodes=8)
    trainer, _ = train(make_policy, tokenizer, prompts, args, reward_model=make_reward_model())
    learner = trainer.run.learner
    models = (learner.policy, learner.reference.model, learner.value, trainer.run.scorer.reward_model)
    assert [model.config._attn_implementation for model in models] == ["eager"] * 4
    with pytest.raises(
        ConfigError, match=r"attn_implementation: got 'egaer'; GPTNeoXForCausalLM \(model\) cannot use it"
    ):
        train(make_policy, tokenizer, prompts, make_args("wrong", attn_implementation="egaer"))


def test_blocks_are_compiled_and_compute_the_same_up_to_rounding(monkeypatch, make_args):
    """With the graphs run as they are: turning them into machine code takes minutes on a CPU."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    tokens_BT, mask_BT = rows()
    found = []
    for compiled in (False, True):
        model = llama(num_hidden_layers=1)
        compile_blocks(model, make_args(torch_compile=compiled))
        assert (model.model.layers[0]._compiled_call_impl is not None) == compiled
        logprobs_BT = response_logprobs(model, tokens_BT, mask_BT, 1.0).logprobs_BT
        logprobs_BT.sum().backward()
        found.append((logprobs_BT.detach(), model.model.embed_tokens.weight.grad))
    for plain, other in zip(*found, strict=True):
        assert torch.allclose(plain, other, rtol=1e-4, atol=1e-5)


def test_every_model_of_the_learner_is_compiled(
    make_policy, make_reward_model, tokenizer, prompts, make_args, monkeypatch
):
    asked: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(self))
    args = make_args(algorithm="ppo", torch_compile=True, total_episodes=8)
    trainer, _ = train(make_policy, tokenizer, prompts, args, reward_model=make_reward_model())
    learner = trainer.run.learner
    models = (learner.policy, learner.reference.model, learner.value, trainer.run.scorer.reward_model)
    assert {id(block) for model in models for block in model.gpt_neox.layers} == {id(block) for block in asked}


def test_what_is_decided_of_recomputing_reaches_the_model(make_policy, tokenizer, prompts, make_args, monkeypatch):
    for decided in (True, False):
        monkeypatch.setattr(
            "async_rlhf.run.inputs.with_sizes",
            lambda config, *_, to=decided: replace(config, gradient_checkpointing=to),
        )
        args = make_args(f"run-{decided}", total_episodes=8)
        trainer = OnlineTrainer(make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
        assert trainer.learner.policy.is_gradient_checkpointing is decided


@pytest.mark.parametrize(("device", "changes"), [("cuda:1", {}), ("cuda:1", {"bf16": True}), ("cpu", {})])
def test_a_gpu_that_computes_in_float32_is_said(tmp_path, caplog, device, changes):
    advise_sixteen_bits(new_args(tmp_path, **changes), torch.device(device))
    said = ["bf16: got false; cuda:1 computes in float32, several times as slow as with bf16: true"]
    assert caplog.messages == (said if device == "cuda:1" and not changes else [])
