"""Rank 0 alone loads a model that is to be sharded, and the others have the same without weights."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny import LLAMA_SIZES, byte_tokenizer, new_policy, new_reward_model, tiny_config
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from async_rlhf.config import ConfigError, LoRAConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.models.adapters import add_adapters, are_trained, is_adapter
from async_rlhf.models.forward import PolicyAndValueWrapper
from async_rlhf.models.loading import frozen_checksum, load_policy
from async_rlhf.models.loading import new_reward_model as new_reward_head
from async_rlhf.models.sharded_loading import loaded_once, make_room, only_on_rank_0
from async_rlhf.models.values import value_model_for
from async_rlhf.run.checkpoint import load_weights

CPU = torch.device("cpu")
TOKENS = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 257}
KINDS: dict[str, hf.PretrainedConfig] = {
    "gpt_neox": tiny_config(),
    "llama": hf.LlamaConfig(**LLAMA_SIZES, **TOKENS),
    "llama with tied embeddings": hf.LlamaConfig(**LLAMA_SIZES, **TOKENS, tie_word_embeddings=True),
    "llama with scaled positions": hf.LlamaConfig(
        **LLAMA_SIZES, **TOKENS, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "qwen2": hf.Qwen2Config(**LLAMA_SIZES, **TOKENS, tie_word_embeddings=True),
    "mixtral": hf.MixtralConfig(**LLAMA_SIZES, **TOKENS, num_local_experts=4),
    "qwen3_moe": hf.Qwen3MoeConfig(
        **LLAMA_SIZES, **TOKENS, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, head_dim=8
    ),
    "gpt2": hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=96, **TOKENS),
}


def written(config: hf.PretrainedConfig, folder: Path, size: str = "1GB") -> Path:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=size)
    byte_tokenizer().save_pretrained(folder)
    return folder


class Heard(Ranks):
    """One of two ranks, of which the second hears what the first has said: pickled, as torch sends it."""

    said: bytes

    def broadcast(self, point, compute):
        if self.is_main:
            type(self).said = pickle.dumps(compute())
        return pickle.loads(self.said)


def both(load: Callable[[], hf.PreTrainedModel]) -> tuple[hf.PreTrainedModel, hf.PreTrainedModel]:
    """What rank 0 and another one get, which loads nothing."""
    return loaded_once(Heard(0, 2), "model", load), loaded_once(Heard(1, 2), "model", partial(pytest.fail, "loads"))


def places(model: nn.Module) -> dict[str, tuple]:
    """Of every parameter its first name, shape, type, and whether it is trained."""
    first = {id(p): name for name, p in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: (first[id(p)], p.shape, p.dtype, p.requires_grad) for name, p in named}


def assert_empty(model: nn.Module, whole: nn.Module) -> None:
    """Require a model to be the whole one but for its weights, which only that has; and both to say so."""
    assert only_on_rank_0(model)
    assert only_on_rank_0(whole)
    assert places(model) == places(whole)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in whole.parameters())
    buffers = dict(whole.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_another_rank_has_rank_0s_model_without_its_weights(kind, tmp_path):
    """With them it computes the same, bit for bit."""
    folder = str(written(KINDS[kind], tmp_path))
    whole, model = both(partial(load_policy, folder))
    assert_empty(model, whole)
    assert frozen_checksum(whole) == frozen_checksum(load_policy(folder))
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.name_or_path == whole.name_or_path
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    assert model.training == whole.training
    make_room(model, CPU)
    assert not only_on_rank_0(model)
    assert places(model) == places(whole)
    model.load_state_dict(whole.state_dict())
    tokens_BT = torch.arange(24).view(2, 12)
    assert torch.equal(model(input_ids=tokens_BT).logits, whole(input_ids=tokens_BT).logits)


def test_buffers_that_no_file_holds_are_there(tmp_path):
    """The danger is real: without their own frequencies all positions would look alike."""
    _, model = both(partial(load_policy, str(written(KINDS["llama"], tmp_path))))
    frequencies = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
    assert "model.rotary_emb.inv_freq" not in load_file(tmp_path / "model.safetensors")
    assert frequencies.unique().numel() == frequencies.numel() > 1


def test_saved_buffers_are_rank_0s_when_weights_are_spread(tmp_path):
    whole, model = both(partial(load_policy, str(written(KINDS["llama"], tmp_path))))
    sent: list[float] = []
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "broadcast", lambda tensor, src: sent.append((tensor.tolist(), src)))
            for number, each in enumerate((whole, model)):
                each.register_buffer("bias", torch.tensor([float(number)]))
                make_room(each, CPU)
    finally:
        dist.destroy_process_group()
    assert sent == [([0.0], 0), ([1.0], 0)]


def test_new_adapters_are_on_both_and_have_numbers_on_rank_0(tmp_path):
    folder = str(written(KINDS["llama"], tmp_path))
    pair, right = both(partial(load_policy, folder)), load_policy(folder)
    for seed, each in enumerate((*pair, right)):
        torch.manual_seed(seed)
        add_adapters(each, LoRAConfig(rank=2), seed=3)
    whole, model = pair
    assert_empty(model, whole)
    assert any(is_adapter(name) for name, _ in model.named_parameters())
    found = dict(whole.named_parameters())
    assert all(torch.equal(found[name], parameter) for name, parameter in right.named_parameters())
    assert [are_trained(each) for each in pair] == [False, False]


def test_copies_and_value_models_are_rank_0s_as_well(tmp_path):
    whole, model = both(partial(load_policy, str(written(KINDS["gpt_neox"], tmp_path))))
    assert_empty(copy.deepcopy(model), copy.deepcopy(whole))
    value, other = both(partial(value_model_for, None, None, whole, CPU))
    assert_empty(other, value)
    assert not value.score.weight.any()
    theirs = dict(whole.base_model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in value.base_model.named_parameters())


@pytest.mark.parametrize("start", [new_policy, new_reward_model])
def test_the_head_of_a_new_reward_model_depends_only_on_the_seed(start, tmp_path):
    """Drawn anew, also on the body of another reward model."""
    start().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    load = partial(new_reward_head, str(tmp_path), byte_tokenizer())
    whole, model = both(partial(load, seed=3))
    assert_empty(model, whole)
    torch.manual_seed(7)
    assert frozen_checksum(whole) == frozen_checksum(load(seed=3))
    assert not torch.equal(load(seed=4).score.weight, whole.score.weight)


def test_of_a_checkpoint_rank_0_alone_reads_the_weights(tmp_path):
    start = written(KINDS["llama"], tmp_path / "start")
    later = hf.AutoModelForCausalLM.from_config(KINDS["llama"])
    later.save_pretrained(tmp_path / "later")
    whole, model = both(partial(load_policy, str(start)))
    load_weights(PolicyAndValueWrapper(whole, None), tmp_path / "later", {}, trust=False)
    load_weights(PolicyAndValueWrapper(model, None), tmp_path / "nowhere", {}, trust=False)
    assert frozen_checksum(whole) == frozen_checksum(later)
    assert_empty(model, whole)


def with_adapter(folder: Path, trained: bool) -> None:
    from peft import LoraConfig, get_peft_model

    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=not trained)
    get_peft_model(base, config).save_pretrained(folder)


def with_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_tied_weights_twice(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", [with_bin, partial(with_adapter, trained=False), with_tied_weights_twice])
def test_files_of_every_kind_will_do(change, tmp_path):
    folder = written(KINDS["llama with tied embeddings"], tmp_path)
    change(folder)
    whole, model = both(partial(load_policy, str(folder)))
    assert_empty(model, whole)
    assert frozen_checksum(whole) == frozen_checksum(load_policy(str(folder)))


def quantised(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    model.hf_quantizer = "bitsandbytes"
    return model


def unsendable(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    model.drawn = lambda: None
    return model


def with_code(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    model.__class__ = type("Theirs", (type(model),), {"__module__": "transformers_modules.theirs"})
    return model


WHOLE = {
    "it is quantised": quantised,
    "it cannot be sent to other ranks": unsendable,
    "it brings code of its own": with_code,
}


@pytest.mark.parametrize("why", [*WHOLE, "its adapters have been trained"])
def test_what_others_cannot_have_without_weights_all_load_and_the_log_says_why(why, tmp_path, caplog):
    folder = written(KINDS["llama"], tmp_path)
    if why not in WHOLE:
        with_adapter(folder, trained=True)

    def load() -> hf.PreTrainedModel:
        return WHOLE.get(why, lambda model: model)(load_policy(str(folder)))

    with caplog.at_level(logging.INFO):
        pair = [loaded_once(Heard(rank, 2), "ref_model", load) for rank in range(2)]
    assert not any(only_on_rank_0(model) for model in pair)
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in pair), strict=True))
    lines = [record.getMessage() for record in caplog.records if "every rank loads all" in record.getMessage()]
    assert len(lines) == 2
    assert all(line.startswith("ref_model: ") and why in line for line in lines)


def test_a_tensor_of_another_shape_is_an_error_that_names_both(tmp_path):
    folder = written(KINDS["llama"], tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as error:
        loaded_once(Heard(0, 2), "model", partial(load_policy, str(folder)))
    assert all(part in str(error.value) for part in ("model: ", "model.norm.weight", "(31,)", "(32,)"))


def test_a_file_that_an_index_names_must_be_there(tmp_path):
    folder = written(KINDS["llama"], tmp_path, size="20kB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / next(iter(index["weight_map"].values()))).unlink()
    with pytest.raises(ConfigError, match="model: no causal language model could be loaded"):
        load_policy(str(folder))
