"""Weights in several files: as transformers would write them, and never more in memory than a file and a layer."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny import LLAMA_SIZES, mixture, new_policy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from async_rlhf.distributed.parallel import ALONE
from async_rlhf.models import saving
from async_rlhf.models.adapters import write_adapter, write_base
from async_rlhf.models.publish import SnapshotFolder
from async_rlhf.models.saving import ModelCopies, write_copy, write_model, write_value_head
from async_rlhf.models.weights import iterate_weights
from async_rlhf.run.checkpoint import _save
from async_rlhf.system.files import naming, whole_folder

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


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """Within, no file may be longer; the error then is as that of a full disk, but for its number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def published(folder):
    snapshots = SnapshotFolder(folder / "published", torch.float32, 1)
    snapshots.draft = {"a": torch.zeros(10_000)}
    snapshots.make_available(1)


WRITERS = {
    "model": lambda folder, tokenizer: write_model(made("llama"), tokenizer, folder),
    "in files": lambda folder, tokenizer: write_copy(made("llama"), tokenizer, folder, [("a", torch.ones(9999))], None),
    "tokenizer": lambda folder, tokenizer: write_model(LlamaForCausalLM(TINY), tokenizer, folder),
    "value head": lambda folder, tokenizer: write_value_head(torch.nn.Linear(9999, 1), folder),
    "copy of a value head": lambda folder, tokenizer: ModelCopies(torch.nn.Linear(9999, 1), tokenizer, ALONE).take({})(
        folder, ()
    ),
    "base": lambda folder, tokenizer: write_base(made("llama"), folder, torch.float32),
    "adapter": lambda folder, tokenizer: write_adapter(None, {"a.lora_A.default.b": torch.ones(9999)}, folder),
    "state": lambda folder, tokenizer: _save({"a": torch.zeros(9999)}, folder / "tensors.safetensors"),
    "snapshot": lambda folder, tokenizer: published(folder),
}
TINY = LlamaConfig(**{**LLAMA_SIZES, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}, vocab_size=9)


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_an_error_of_the_disk_whoever_writes(what, tmp_path, tokenizer):
    with no_room(3000), pytest.raises(OSError, match="File too large") as failed:
        WRITERS[what](tmp_path, tokenizer)
    assert failed.value.errno == errno.EFBIG
    assert str(failed.value.filename).startswith(str(tmp_path))
    assert what == "tokenizer" or not [path for path in tmp_path.rglob("*") if ".safetensors" in path.name]
    with no_room(3000), pytest.raises(OSError, match="File too large"), whole_folder(tmp_path / "whole") as folder:
        WRITERS[what](folder, tokenizer)
    assert not list(tmp_path.glob("*whole*"))


def test_other_errors_stay_as_they_are(tmp_path):
    for error in (ValueError("(os error x)"), OSError(errno.ENOENT, "gone"), RuntimeError("gone (os error 2)")):
        with pytest.raises(type(error)) as failed, naming(tmp_path):
            raise error
        assert failed.value is error
