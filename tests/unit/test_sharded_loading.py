"""Each rank reads its own share of a model from its files, and has what it would have had of the whole one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny import LLAMA_SIZES, byte_tokenizer, new_policy, new_reward_model, tiny_config
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from async_rlhf.config import ConfigError, LoRAConfig, ParallelConfig
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel
from async_rlhf.models import sharded_loading, weight_sources
from async_rlhf.models.adapters import add_adapters, is_adapter
from async_rlhf.models.frozen_models import frozen
from async_rlhf.models.loading import frozen_checksum, load_policy, load_reward_model
from async_rlhf.models.loading import new_reward_model as new_reward_head
from async_rlhf.models.sharded_loading import fill_in_turn, is_on_meta, take_weights
from async_rlhf.models.values import new_value_model

RANKS = 3
"""Divides few of the sizes."""
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
    "qwen3_moe": hf.Qwen3MoeConfig(**LLAMA_SIZES, **TOKENS, num_experts=2, moe_intermediate_size=16, head_dim=8),
    "gpt2": hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=96, **TOKENS),
}


def written(config: hf.PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, size: str = "1GB") -> Path:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder, max_shard_size=size)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(params=range(RANKS))
def one_of_three(request, make_args) -> Iterator[Callable[[], FullyShardedDataParallel]]:
    """FSDP2 on one rank of three, whose partners do not exist: nothing here needs them.

    To be called after files have been written, because transformers writes some on rank 0 alone.
    """

    def start() -> FullyShardedDataParallel:
        dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=RANKS)
        ranks = Ranks(request.param, RANKS)
        return FullyShardedDataParallel(
            ranks, ParallelConfig("fsdp", ranks=RANKS), torch.device("cpu"), make_args(bf16=True)
        )

    try:
        yield start
    finally:
        dist.destroy_process_group()
        # torch remembers what became of equal tensors on an equal mesh, where this process was another rank.
        _clear_sharding_prop_cache()


def assert_shares(model: nn.Module, whole: nn.Module) -> None:
    """Require the model to hold this rank's share of the whole one, bit for bit, and to share what that shares."""
    right = dict(whole.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(right)
    rank = dist.get_rank()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.requires_grad == right[name].requires_grad
        parts = right[name].data.chunk(RANKS, dim=parameter.placements[0].dim)
        mine = parts[rank] if rank < len(parts) else right[name].data[:0]
        assert torch.equal(parameter.to_local(), mine), name
        assert parameter.dtype == right[name].dtype
    buffers = dict(whole.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_its_share_of_the_model_that_is_read_whole(one_of_three, kind, tmp_path):
    folder = str(written(KINDS[kind], tmp_path))
    whole, model = load_policy(folder), load_policy(folder, on_meta=True)
    assert is_on_meta(model)
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.name_or_path == whole.name_or_path
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()
    assert model.training == whole.training
    assert [str(each) for each in model._weight_conversions] == [str(each) for each in whole._weight_conversions]
    assert frozen_checksum(model) == frozen_checksum(whole)
    one_of_three().prepare(model, [model], lambda: torch.optim.SGD(model.parameters(), lr=0.1))
    assert not is_on_meta(model)
    assert_shares(model, whole)


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "llama with tied embeddings", "mixtral"])
def test_for_others_to_spread_weights_are_made_whole_one_after_the_other(kind, reads, tmp_path):
    folder = str(written(KINDS[kind], tmp_path))
    model, right = load_policy(folder, on_meta=True), dict(load_policy(folder).named_parameters())
    kept: list[torch.Tensor] = []

    def keep(parameter: nn.Parameter) -> None:
        assert sum(p.numel() for p in model.parameters() if not p.is_meta) == 0  # those before are spread
        kept.append(parameter.data.clone())
        parameter.data = torch.empty(0)

    made = fill_in_turn(model, keep, reads)
    assert not is_on_meta(model)
    assert set(made.values()) == set(model.parameters())
    assert len(kept) == len(right)
    place = {id(parameter): number for number, parameter in enumerate(made.values())}
    found = {name: kept[place[id(parameter)]] for name, parameter in model.named_parameters()}
    assert list(found) == list(right)
    assert all(found[name].shape == tensor.shape for name, tensor in right.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in right.items()) == reads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_have_the_type_that_they_are_held_in_whatever_their_files_have(
    one_of_three, dtype, tmp_path, make_args
):
    folder, args = str(written(KINDS["llama with tied embeddings"], tmp_path, dtype, "20kB")), make_args(bf16=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1  # an index says what is in which
    whole, model = load_policy(folder), load_policy(folder, on_meta=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert frozen_checksum(model) == frozen_checksum(whole)
    for each in (whole, model):
        each.requires_grad_(False)
    parallel = one_of_three()
    frozen(model, args, parallel)
    parallel._shard = lambda *_: None
    frozen(whole, args, parallel)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_shares(model, whole)


def test_new_adapters_are_the_same_on_weights_that_are_not_read_yet(one_of_three, tmp_path):
    folder = str(written(KINDS["llama"], tmp_path))
    whole, model = load_policy(folder), load_policy(folder, on_meta=True)
    for each in (whole, model):
        torch.manual_seed(5)
        add_adapters(each, LoRAConfig(rank=2), seed=3)
    assert any(is_adapter(name) for name, _ in model.named_parameters())
    one_of_three().prepare(model, [model], lambda: torch.optim.SGD(model.parameters(), lr=0.1))
    assert_shares(model, whole)


def test_a_value_model_on_the_policys_body_is_unread_as_well(one_of_three, tmp_path):
    folder = str(written(KINDS["gpt_neox"], tmp_path))
    right, value = (new_value_model(load_policy(folder, on_meta=on_meta)) for on_meta in (False, True))
    assert is_on_meta(value)
    assert frozen_checksum(value) == frozen_checksum(right)
    one_of_three().prepare(value, [value], lambda: torch.optim.SGD(value.parameters(), lr=0.1))
    assert_shares(value, right)


@pytest.mark.parametrize("start", [new_policy, new_reward_model])
def test_a_new_reward_model_has_the_same_head_whether_its_body_is_read_or_not(start, tmp_path):
    """Drawn anew, also on the body of another reward model."""
    start().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    whole, unread = (new_reward_head(str(tmp_path), byte_tokenizer(), seed=3, on_meta=m) for m in (False, True))
    assert is_on_meta(unread)
    assert frozen_checksum(unread) == frozen_checksum(whole)
    other = new_reward_head(str(tmp_path), byte_tokenizer(), seed=4)
    assert not torch.equal(other.score.weight, whole.score.weight)


def test_a_checkpoints_weights_replace_those_of_the_start(one_of_three, tmp_path):
    start, later = tmp_path / "start", tmp_path / "later"
    new_reward_model(1).save_pretrained(start)
    new_reward_model(2).save_pretrained(later)
    parallel = one_of_three()
    for within in ("", "score"):
        model, whole = (load_reward_model(str(start), on_meta=on_meta) for on_meta in (True, False))
        take_weights(model, load_reward_model(str(later), on_meta=True), within)
        take_weights(whole, load_reward_model(str(later)), within)
        assert frozen_checksum(model) == frozen_checksum(whole)
        parallel.frozen(model)
        assert_shares(model, whole)


def test_checksums_are_computed_a_few_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_sources, "CHUNK", 1000)
    folder = str(written(KINDS["llama"], tmp_path, torch.bfloat16))
    model = load_policy(folder, on_meta=True)
    parts = list(weight_sources.rows(model._weights_to_read.origins["model.embed_tokens.weight"]))
    assert len(parts) > 10
    assert {part.dtype for part in parts} == {torch.float32}
    assert frozen_checksum(model) == frozen_checksum(load_policy(folder))


def with_bin(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(hf.AutoModelForCausalLM.from_pretrained(folder), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(folder)


def with_tied_weights_twice(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


WHOLE = {
    "has neither model.safetensors nor": (KINDS["llama"], with_bin),
    "has adapters": (KINDS["llama"], with_adapter),
    "holds tied weights more than once|hold tied weights more than once": (
        KINDS["llama with tied embeddings"],
        with_tied_weights_twice,
    ),
}


@pytest.mark.parametrize("why", WHOLE)
def test_what_cannot_be_read_in_parts_is_read_whole_and_the_log_says_why(why, tmp_path, caplog):
    config, change = WHOLE[why]
    folder = written(config, tmp_path)
    change(folder)
    with caplog.at_level(logging.INFO):
        model = load_policy(str(folder), on_meta=True)
    assert not is_on_meta(model)
    lines = [record.getMessage() for record in caplog.records if "every rank reads all of" in record.getMessage()]
    assert len(lines) == 1
    assert any(part in lines[0] for part in why.split("|"))
    assert frozen_checksum(model) == frozen_checksum(load_policy(str(folder)))


def changed(folder: Path, change) -> str:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def both_errors(folder: str) -> list[str]:
    found = []
    for on_meta in (False, True):
        with pytest.raises(ConfigError) as error:
            load_policy(folder, on_meta=on_meta)
        found.append(str(error.value))
    return found


def test_missing_tensors_are_an_error_with_the_same_words(tmp_path):
    folder = changed(written(KINDS["llama"], tmp_path), lambda weights: weights.pop("model.norm.weight"))
    whole, parts = both_errors(folder)
    assert parts == whole
    assert "lacks the weights model.norm.weight" in parts


def test_a_tensor_of_another_shape_is_an_error_that_names_both(tmp_path):
    def narrow(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()

    _, parts = both_errors(changed(written(KINDS["llama"], tmp_path), narrow))
    assert "model.norm.weight" in parts
    assert "(31,)" in parts
    assert "(32,)" in parts


def test_surplus_tensors_are_named_and_left_out(tmp_path, caplog):
    def more(weights):
        weights["model.extra.weight"] = torch.zeros(2)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)  # of older versions, never missed

    folder = changed(written(KINDS["llama"], tmp_path), more)
    said = []
    for on_meta in (False, True):
        caplog.clear()
        load_policy(folder, on_meta=on_meta)
        said.append([record.getMessage() for record in caplog.records if "left out" in record.getMessage()])
    assert said[0] == said[1]
    assert "1 weights belong to no causal language model and are left out: model.extra.weight" in said[1][0]


def test_a_file_that_an_index_names_must_be_there(tmp_path):
    folder = written(KINDS["llama"], tmp_path, size="20kB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / next(iter(index["weight_map"].values()))).unlink()
    with pytest.raises(ConfigError, match="model: no causal language model could be loaded"):
        load_policy(str(folder), on_meta=True)


class Told(Ranks):
    """A rank whose partners' answers are known."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__(rank, count)
        self.others: dict[str, list] = {}

    def gather(self, point, value):
        return [value if rank == self.rank else self.others[point][rank] for rank in range(self.count)]


def test_ranks_of_a_host_share_the_checksums_and_other_files_have_their_own(tmp_path, monkeypatch):
    folders = [str(written(KINDS["llama"], tmp_path / name)) for name in ("ours", "same", "theirs")]
    models = [load_policy(folder, on_meta=True) for folder in (folders[0], folders[0], folders[2])]
    sources = [model._weights_to_read for model in models]
    names = list(sources[0].origins)
    whole = {name: models[2]._weights_to_read.digest(name) for name in names}
    ranks = Told(0, 3)
    ranks.others["files of models"] = [{"model": source.identity()} for source in sources]
    wrong = dict.fromkeys(names, "of another file")
    ranks.others["checksums of models"] = [
        {},
        {"model": {name: f"by the other rank: {name}" for name in names[1::2]}},
        {"model": wrong},
    ]
    sharded_loading.share_digests(ranks, {"model": models[0], "ref_model": None})
    found = sources[0].digests
    assert list(found) == [*names[0::2], *names[1::2]]
    assert all(found[name] == whole[name] for name in names[0::2])
    assert all(found[name] == f"by the other rank: {name}" for name in names[1::2])


def test_buffers_that_no_file_holds_are_computed(tmp_path):
    """The danger is real: without their own frequencies all positions would look alike."""
    model: hf.PreTrainedModel = load_policy(str(written(KINDS["llama"], tmp_path)), on_meta=True)
    frequencies = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
    assert "model.rotary_emb.inv_freq" not in load_file(tmp_path / "model.safetensors")
    assert frequencies.unique().numel() == frequencies.numel() > 1


def test_models_by_name_are_unread_only_where_they_are_told_to_be(tmp_path):
    new_policy().save_pretrained(tmp_path)
    assert isinstance(KINDS["gpt_neox"], hf.GPTNeoXConfig)
    assert not is_on_meta(load_policy(str(tmp_path)))
