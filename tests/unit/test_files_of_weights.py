"""Weights in several files: as transformers would write them, and never more in memory than a file and a layer."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from tiny import LLAMA_SIZES, mixture, new_policy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from async_rlhf.models import saving
from async_rlhf.models.saving import write_copy, write_model
from async_rlhf.models.weights import iterate_weights

SMALL = 20_000


def made(kind: str) -> PreTrainedModel:
    if kind == "gpt_neox":
        return new_policy()
    if kind in ("mixtral", "qwen3_moe"):
        return mixture(kind)
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES, vocab_size=258, tie_word_embeddings=kind == "tied"))


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "tied", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_files_hold_what_save_pretrained_writes(kind, dtype, tmp_path, tokenizer, monkeypatch):
    model = made(kind).to(dtype)
    model.save_pretrained(tmp_path / "right")
    read = written = largest = 0
    save = type(model).save_pretrained

    def counted(self, folder, state_dict):
        nonlocal written, largest
        size = sum(tensor.nbytes for tensor in state_dict.values())
        written, largest = written + size, max(largest, size)
        save(self, folder, state_dict=state_dict)

    layers: dict[str, int] = {}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal read
        for name, tensor in iterate_weights(model):
            read += tensor.nbytes
            layer = name.split(".layers.")[-1].split(".")[0] if ".layers." in name else name
            layers[layer] = layers.get(layer, 0) + tensor.nbytes
            assert read - written <= SMALL + 2 * max(layers.values())
            yield name, tensor

    monkeypatch.setattr(saving, "FILE_BYTES", SMALL)
    monkeypatch.setattr(type(model), "save_pretrained", counted)
    write_copy(model, tokenizer, tmp_path / "files", tensors(), None)
    assert largest <= max(SMALL, *layers.values())
    index = json.loads((tmp_path / "files" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "files").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) > 2
    assert index["metadata"]["total_size"] == read == sum(p.nbytes for p in model.parameters())
    ours, right = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype) for name in ("files", "right"))
    assert ours.state_dict().keys() == right.state_dict().keys()
    assert all(torch.equal(tensor, right.state_dict()[name]) for name, tensor in ours.state_dict().items())


def test_what_fits_into_one_file_is_the_file_of_save_pretrained(tmp_path, tokenizer):
    model = made("tied")
    model.save_pretrained(tmp_path / "right")
    write_copy(model, tokenizer, tmp_path / "file", iterate_weights(model), None)
    ours, right = (tmp_path / name / "model.safetensors" for name in ("file", "right"))
    assert ours.read_bytes() == right.read_bytes()
    assert not (tmp_path / "file" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "tied", "mixtral", "qwen3_moe"])
def test_files_in_bfloat16_hold_rounded_weights(kind, tmp_path, tokenizer):
    model = made(kind)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_model(model, tokenizer, tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size == pytest.approx(2 * sum(p.numel() for p in model.parameters()), abs=8_000)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert tokenizer.eos_token_id in found.generation_config.eos_token_id
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    assert found.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name].to(tensor.dtype)) for name, tensor in found.state_dict().items())
