"""Weights that two ranks spread are written one file at a time, and loaded as if they had been gathered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import chosen, finish, launch, weights_of
from safetensors.torch import load_file
from tiny import rare
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.distributed

OPTIONS = {"staleness": 1, "total_episodes": 32, "save_steps": 1, "lr_scheduler_type": "constant"}
RUNS = {
    "fsdp": {"strategy": "fsdp"},
    "zero3": {"strategy": "zero3"},
    "beside training": {"strategy": "fsdp", "checkpoint_format": "sharded"},
    "adapters": {"strategy": "fsdp", "lora": 2},
    "values": {"strategy": "zero3", "algorithm": "ppo"},
}
SMALL = 20_000
"""Bytes of a file: a layer of the tiny policy has 34,000."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Path:
    """The chosen ones in files of 2 GiB and in small ones."""
    folder = tmp_path_factory.mktemp("files")
    runs = [
        {"folder": str(folder), "name": name, **OPTIONS, **changes}
        for name, changes in RUNS.items()
        if (name,) in chosen(request)
    ]
    small = [{**run, "name": f"{run['name']} in small files", "file_bytes": SMALL} for run in runs]
    half = [{**small[i], "name": f"{small[i]['name']} in 16 bits", "export_dtype": "bfloat16"} for i in (0, 1)]
    resumed = {"resume_from": str(folder / "zero3 in small files" / "checkpoint-1"), "resume_anyway": True}
    again = {**small[1], "name": "again", **resumed}
    finish(launch([*runs, *small, *half, again], 2, folder / "log"), folder / "log", 400)
    return folder


@pytest.mark.parametrize("name", ["fsdp", "zero3", rare("beside training"), rare("adapters"), rare("values")])
def test_small_files_hold_what_one_does_bit_for_bit(folder, name):
    for place in ("final", "checkpoint-1"):
        small, whole = folder / f"{name} in small files" / place, folder / name / place
        files = sorted(small.glob("*.safetensors"))
        assert len(files) > 2
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        right = load_file(whole / "model.safetensors")
        written = {key: tensor for file in files for key, tensor in load_file(file).items()}
        assert written.keys() == right.keys()
        assert all(torch.equal(written[key], right[key]) for key in right)
        ours, theirs = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (small, whole))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", ["fsdp", "zero3"])
def test_the_last_policy_may_be_rounded(folder, name):
    files = (folder / f"{name} in small files in 16 bits" / "final").glob("*.safetensors")
    ours = {key: tensor for file in files for key, tensor in load_file(file).items()}
    theirs = weights_of(folder / name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[key].to(torch.bfloat16)) for key, tensor in ours.items())


def test_a_run_goes_on_from_small_files(folder):
    last = sorted((folder / "again" / "final").glob("*.safetensors"))
    ours = {key: tensor for file in last for key, tensor in load_file(file).items()}
    theirs = weights_of(folder / "zero3")
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
