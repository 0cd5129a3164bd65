"""Low-rank adapters: only they are trained, the reference is the base, and everyone else gets merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from tiny import LLAMA_SIZES, count_letters, json_rows, mixture
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from async_rlhf import KLConfig, LoRAConfig
from async_rlhf.algorithms.table import BUILT_IN
from async_rlhf.commands.sft import run_sft
from async_rlhf.config import AdapterConfig, ConfigError, SFTConfig
from async_rlhf.models import loading
from async_rlhf.models.adapters import adapters_off, add_adapters, unwrap
from async_rlhf.models.saving import write_model
from async_rlhf.models.values import new_value_model
from async_rlhf.models.weights import named_weights
from async_rlhf.run.trainer import OnlineTrainer

TOKENS_BT = torch.arange(3, 33).view(3, 10)


def models():
    torch.manual_seed(0)
    yield LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=True, **LLAMA_SIZES))
    yield GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def stir(model) -> None:
    """Adapters start as nothing; give them something to do."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=generator)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_merged_weights_have_the_plain_models_names_and_output():
    for model in (model.eval() for model in models()):
        plain = {name: tensor.clone() for name, tensor in named_weights(model).items()}
        before = model(TOKENS_BT).logits
        add_adapters(model, LoRAConfig(rank=3), seed=0)
        assert torch.equal(model(TOKENS_BT).logits, before)
        stir(model)
        adapted = model(TOKENS_BT).logits
        assert (adapted - before).abs().max() > 0.1
        with adapters_off(model):
            assert torch.equal(model(TOKENS_BT).logits, before)
        assert torch.equal(model(TOKENS_BT).logits, adapted)

        merged = named_weights(model)
        assert list(merged) == list(plain)
        changed = {name for name, tensor in merged.items() if not torch.equal(tensor, plain[name])}
        assert changed
        assert all("weight" in name for name in changed)
        fresh = type(model)(model.config).eval()
        fresh.load_state_dict({**fresh.state_dict(), **merged})
        torch.testing.assert_close(fresh(TOKENS_BT).logits, adapted, rtol=1e-4, atol=1e-4)


def written(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def llama(**options):
    torch.manual_seed(0)
    ids = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
    return LlamaForCausalLM(LlamaConfig(vocab_size=258, **LLAMA_SIZES, **ids, **options))


TARGETS = [
    (llama, [[], ["lm_head"], ["q_proj", "lm_head"]]),
    (lambda: llama(tie_word_embeddings=True), [[], ["q_proj"]]),
    (lambda: mixture("mixtral"), [[], ["lm_head"]]),
    (lambda: mixture("qwen3_moe"), [[]]),
]


@pytest.mark.parametrize(("make", "targets"), [(make, one) for make, several in TARGETS for one in several])
def test_what_is_trained_is_what_is_saved_whatever_is_adapted(make, targets, tokenizer, prompts, make_args, tmp_path):
    """The loss that is said is that of the model that was saved; and online, the policy is."""
    write_model(make(), tokenizer, tmp_path / "base")
    rows = written(tmp_path / "rows.jsonl", [{"prompt": f"a{i}", "completion": f"bcd{i}"} for i in range(16)])
    base = {"eval": rows, "per_device_train_batch_size": 8, "device": "cpu", "num_epochs": 1}
    lora = AdapterConfig(rank=2, target_modules=targets)
    folders = [str(tmp_path / name) for name in ("base", "trained", "again")]
    said = run_sft(SFTConfig(rows, folders[1], model=folders[0], lora=lora, learning_rate=0.02, **base))
    saved = run_sft(SFTConfig(rows, folders[2], model=folders[1], learning_rate=1e-30, **base))
    assert said["eval_loss"] == pytest.approx(saved["eval_loss"], rel=1e-6)

    policy, args = make(), make_args(total_episodes=8, learning_rate=0.02, lora=LoRAConfig(2, target_modules=targets))
    trainer = OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    trainer.train()
    assert all(p.any() for name, p in policy.named_parameters() if "lora_B" in name)
    final = AutoModelForCausalLM.from_pretrained(Path(args.output_dir) / "final")
    torch.testing.assert_close(final(TOKENS_BT).logits, policy(TOKENS_BT).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "targets", "expected"),
    [
        (lambda: llama(tie_word_embeddings=True), ["q_proj", "lm_head"], "lm_head shares its weight with another one"),
        (lambda: llama(tie_word_embeddings=True), ["embed_tokens"], "model.embed_tokens is a Embedding and no linear"),
        (llama, ["embed_tokens"], "model.embed_tokens is a Embedding and no linear layer"),
        (lambda: mixture("mixtral"), ["gate"], "mlp.gate is a MixtralTopKRouter and no linear layer"),
        (llama, ["norm"], "Norm.* is not supported"),
        (llama, ["nothing"], "not found in the base model"),
    ],
)
def test_what_cannot_be_merged_is_refused_before_weights_are_loaded(
    make, targets, expected, tokenizer, prompts, make_args, tmp_path, monkeypatch
):
    write_model(make(), tokenizer, tmp_path / "base")
    rows, lora = written(tmp_path / "rows.jsonl", [{"text": "a"}]), LoRAConfig(rank=2, target_modules=targets)
    monkeypatch.setattr(loading, "_load", lambda *_, **__: pytest.fail("weights were loaded"))
    args = make_args(lora=lora)
    stage = SFTConfig(rows, str(tmp_path / "out"), model=str(tmp_path / "base"), lora=AdapterConfig(2, 1.0, targets))
    for start in (
        lambda: run_sft(stage),
        lambda: OnlineTrainer(str(tmp_path / "base"), args, prompts, reward_funcs=count_letters),
        lambda: add_adapters(make(), lora, 0),
    ):
        with pytest.raises(ConfigError, match=rf"lora.target_modules: got \[.*\].*{expected}"):
            start()


def test_a_users_own_adapters_that_cannot_be_merged_are_refused():
    tied = llama(tie_word_embeddings=True)
    own = peft.get_peft_model(tied, peft.LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    with pytest.raises(ConfigError, match=r"model: got .*default.*; lm_head shares its weight"):
        unwrap(own)


def test_the_seed_decides_the_adapters():
    first, second, other = (
        add_adapters(next(iter(models())), LoRAConfig(rank=2), seed=seed).state_dict() for seed in (5, 5, 6)
    )
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_every_algorithm_trains_adapters_only(make_policy, tokenizer, prompts, make_args, algorithm):
    """In two processes: the generator, with merged weights, samples as the learner with adapters would."""
    args = make_args(
        generation={"placement": "process"},
        algorithm=algorithm,
        samples_per_prompt=2,
        total_episodes=24,
        lora=LoRAConfig(rank=4, alpha=8.0),
        **({} if algorithm == "online_dpo" else {"kl": KLConfig(coef=0.02)}),
    )
    policy = make_policy()
    before = {name: tensor.clone() for name, tensor in named_weights(policy).items()}
    trainer = OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    trainer.train()
    assert trainer.learner.reference.model is None  # no second copy
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    for name, parameter in policy.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name

    lines = json_rows(Path(args.output_dir) / "metrics.jsonl")
    assert [line["schedule/lag"] for line in lines] == [0, 0, 0]
    # The first of two steps is taken with the very weights that sampled, the second half a step later.
    assert all(abs(line["val/ratio"] - 1) < 0.05 for line in lines)
    assert abs(lines[0]["objective/kl"]) < 1e-4 < abs(lines[2]["objective/kl"])

    final = Path(args.output_dir) / "final"
    loaded = AutoModelForCausalLM.from_pretrained(final)
    for name, tensor in named_weights(policy).items():
        torch.testing.assert_close(loaded.get_parameter(name), tensor)
    base = make_policy()
    with_adapter = peft.PeftModel.from_pretrained(base, final / "adapter")
    with torch.no_grad():
        expected = policy(TOKENS_BT).logits
        torch.testing.assert_close(with_adapter(TOKENS_BT).logits, expected)
        torch.testing.assert_close(loaded(TOKENS_BT).logits, expected, rtol=1e-4, atol=1e-4)
    assert load_file(final / "adapter" / "adapter_model.safetensors").keys() == {
        f"base_model.model.{name.replace('.default', '')}" for name in trained
    }


def test_a_users_own_peft_model_is_trained(make_policy, tokenizer, prompts, make_args):
    own = peft.get_peft_model(make_policy(), peft.LoraConfig(r=2, target_modules=["dense"], task_type="CAUSAL_LM"))
    trainer = OnlineTrainer(
        own, make_args(total_episodes=8), prompts, reward_funcs=count_letters, processing_class=tokenizer
    )
    assert trainer.learner.reference.model is None
    before = {name: p.clone() for name, p in own.named_parameters()}
    trainer.train()
    moved = {name for name, p in own.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_reference_of_adapters_that_come_trained_is_the_policy_as_it_starts(
    make_policy, tokenizer, prompts, make_args, tmp_path, by_name
):
    """Before the first step its KL to the policy is nothing, and the adapters go on from where they were."""
    config = peft.LoraConfig(r=2, target_modules=["dense"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_policy(), config)
    stir(model)
    start = {name: p.clone() for name, p in model.get_base_model().named_parameters()}
    if by_name:
        make_policy().save_pretrained(tmp_path / "base")
        model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        model.save_pretrained(tmp_path / "adapter")
        tokenizer.save_pretrained(tmp_path / "adapter")
    args = make_args(algorithm="rloo", learning_rate=1e-3, total_episodes=16)
    given = {"reward_funcs": count_letters} | ({} if by_name else {"processing_class": tokenizer})
    trainer = OnlineTrainer(str(tmp_path / "adapter") if by_name else model, args, prompts, **given)
    now = dict(trainer.learner.policy.named_parameters())
    assert all(torch.equal(p, start[name]) for name, p in now.items())
    assert {name for name, p in now.items() if p.requires_grad} == {name for name in now if "lora_" in name}
    trainer.train()
    first, *_ = [line for line in json_rows(Path(args.output_dir, "metrics.jsonl")) if "objective/kl" in line]
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    for name, parameter in trainer.learner.reference.model.named_parameters():
        assert torch.equal(parameter, start[name])
    assert any(not torch.equal(p, start[name]) for name, p in now.items())


def test_pefts_word_for_every_linear_layer(make_policy):
    word, empty = (
        add_adapters(make_policy(), LoRAConfig(rank=2, target_modules=m), seed=0) for m in ("all-linear", [])
    )
    assert [name for name, _ in word.named_parameters()] == [name for name, _ in empty.named_parameters()]


def test_new_adapters_beside_those_of_the_model_are_refused(make_policy, tokenizer, prompts, make_args):
    own = peft.get_peft_model(make_policy(), peft.LoraConfig(r=2, target_modules=["dense"], task_type="CAUSAL_LM"))
    args = make_args(lora=LoRAConfig(rank=2))
    with pytest.raises(ConfigError, match=r"lora.rank: got 2; must be 0: the model has adapters, which are trained"):
        OnlineTrainer(own, args, prompts, reward_funcs=count_letters, processing_class=tokenizer)


def test_a_peft_model_that_was_loaded_frozen_is_refused(make_policy, tokenizer, prompts, make_args, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["dense"], task_type="CAUSAL_LM")
    peft.get_peft_model(make_policy(), config).save_pretrained(tmp_path / "adapter")
    frozen = peft.PeftModel.from_pretrained(make_policy(), tmp_path / "adapter")
    with pytest.raises(ConfigError, match="is_trainable=True"):
        OnlineTrainer(frozen, make_args(), prompts, reward_funcs=count_letters, processing_class=tokenizer)


def test_a_value_model_on_an_adapted_policy_has_its_merged_body(make_policy):
    policy = add_adapters(make_policy(), LoRAConfig(rank=2), seed=0)
    stir(policy)
    hidden = new_value_model(policy).base_model(TOKENS_BT).last_hidden_state
    torch.testing.assert_close(hidden, policy.base_model(TOKENS_BT).last_hidden_state, rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_merged_are_refused(make_policy):
    dora = peft.get_peft_model(make_policy(), peft.LoraConfig(r=2, target_modules=["dense"], use_dora=True))
    with pytest.raises(ConfigError, match="DoRA"):
        unwrap(dora)
    prompt_tuning = peft.get_peft_model(
        make_policy(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ConfigError, match="PROMPT_TUNING"):
        unwrap(prompt_tuning)
    with pytest.raises(ConfigError, match=r"lora.target_modules: got \['nothing'\]"):
        add_adapters(make_policy(), LoRAConfig(rank=2, target_modules=["nothing"]), seed=0)


def test_gradient_checkpointing_changes_no_gradient(make_policy, tokenizer, prompts, make_args):
    found = []
    for name, checkpointing in (("with", True), ("products kept", "selective"), ("without", False)):
        args = make_args(
            name, total_episodes=8, num_epochs=2, lora=LoRAConfig(rank=2), gradient_checkpointing=checkpointing
        )
        policy = make_policy()
        OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
        found.append({n: p.detach() for n, p in policy.named_parameters() if p.requires_grad})
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[2][name], rtol=1e-4, atol=1e-6)
        assert torch.equal(found[1][name], found[2][name])
