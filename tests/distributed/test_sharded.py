"""Sharded checkpoints of several ranks: each writes its own part, and any number of them goes on from all parts."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import chosen, family, finish, kill_all, launch, left_of, metrics_of, weights_of
from safetensors import safe_open
from tiny import rare

from async_rlhf.run.manifest import verify

pytestmark = pytest.mark.distributed

OPTIONS = {
    "staleness": 1,
    "total_episodes": 96,
    "save_steps": 3,
    "lr_scheduler_type": "constant",
    "checkpoint_format": "sharded",
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "copies": {"strategy": "fsdp", "parallel": {"shard_size": 1}},
    "adapters": {"strategy": "fsdp", "lora": 2},
    "values": {"strategy": "fsdp", "algorithm": "ppo", "max_grad_norm": 0.0},
}
NAMES = ["ddp", "fsdp", rare("copies"), rare("adapters"), "values"]
OTHERS = {"fsdp-from-ddp": ("fsdp", "ddp"), "ddp-from-fsdp": ("ddp", "fsdp"), "copies-from-fsdp": ("copies", "fsdp")}
"""Runs that go on from another strategy's checkpoint."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Path:
    """The chosen ones on two ranks, and once more from its middle; all in the same processes."""
    folder = tmp_path_factory.mktemp("sharded")
    first = [
        {"folder": str(folder), "name": name, **changes, **OPTIONS}
        for name, changes in STRATEGIES.items()
        if (name,) in chosen(request)
    ]
    whole = [{**run, "name": f"{run['name']}-whole", "checkpoint_format": "whole"} for run in first]
    again = [{**run, "name": f"{run['name']}-again", **resumed(folder, run["name"])} for run in first]
    others = [
        {"folder": str(folder), "name": name, **OPTIONS, **STRATEGIES[mine], **resumed(folder, other)}
        for name, (mine, other) in OTHERS.items()
        if (name,) in chosen(request)
    ]
    finish(launch([*first, *whole, *again, *others], 2, folder / "log"), folder / "log", 400)
    return folder


def resumed(folder: Path, name: str) -> dict[str, Any]:
    return {"resume_from": str(folder / name / "checkpoint-3"), "resume_anyway": True}


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_writes_its_part(folder, name):
    checkpoint = folder / name / "checkpoint-3"
    verify(checkpoint)
    files = sorted((checkpoint / "resume" / "shards").iterdir())
    assert [file.name.split("-model")[0] for file in files] == ["shard-00001", "shard-00002"]
    sizes = [file.stat().st_size for file in files]
    if name != "adapters":  # so small that the bytes which describe them count
        assert max(sizes) < 1.5 * min(sizes)
    assert not list((folder / name).glob(".*tmp"))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_from_shards_is_the_uninterrupted_one(folder, name):
    """Which is that with whole checkpoints, too."""
    assert metrics_of(folder / name) == metrics_of(folder / f"{name}-whole")
    assert metrics_of(folder / f"{name}-again") == metrics_of(folder / name)[3:]
    require_equal(weights_of(folder / f"{name}-again"), weights_of(folder / name))
    ours, theirs = (folder / run / "checkpoint-3" / "model.safetensors" for run in (name, f"{name}-whole"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("name", ["fsdp-from-ddp", "ddp-from-fsdp", rare("copies-from-fsdp")])
def test_shards_do_not_depend_on_what_spread_the_weights(folder, name):
    left, right = weights_of(folder / name), weights_of(folder / OTHERS[name][1])
    for key, tensor in right.items():
        assert torch.allclose(left[key], tensor, rtol=0, atol=1e-6), key


def test_what_files_hold_is_found_out_by_one_rank(tmp_path):
    """To read, each opens every file once at most, of many small ones; rank 0 alone has opened all of them before."""
    run = {"folder": str(tmp_path), **OPTIONS, "strategy": "fsdp", "total_episodes": 32, "save_steps": 1}
    first = {**run, "name": "first", "shard_bytes": 20_000}
    again = {"resume_from": str(tmp_path / "first" / "checkpoint-1"), "resume_anyway": True, "opens": "opens"}
    finish(launch([first, {**run, "name": "again", **again}], 2, tmp_path / "log"), tmp_path / "log", 200)
    files = sorted(path.name for path in (tmp_path / "first" / "checkpoint-1" / "resume" / "shards").iterdir())
    assert len(files) > 8
    first, second = (Counter(json.loads((tmp_path / f"opens-{rank}").read_text())) for rank in (0, 1))
    assert (sorted(first), max(first.values()), set(second.values())) == (files, 2, {1})
    require_equal(weights_of(tmp_path / "again"), weights_of(tmp_path / "first"))


ALONE = ["ddp", "fsdp"]


@pytest.fixture(scope="module")
def alone(folder) -> Path:
    """One process goes on from the checkpoints of two ranks, with as large a batch."""
    one = {"folder": str(folder), **OPTIONS, "gradient_accumulation_steps": 2}
    log = folder / "alone.log"
    finish(launch([{**one, "name": f"{name}-alone", **resumed(folder, name)} for name in ALONE], 1, log), log, 120)
    return folder


@pytest.mark.parametrize("name", ALONE)
def test_one_process_goes_on_from_the_shards_of_two(alone, folder, name):
    left, right = weights_of(folder / f"{name}-alone"), weights_of(folder / name)
    for key, tensor in right.items():
        assert torch.allclose(left[key], tensor, rtol=0, atol=1e-6), key


def require_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_a_rank_whose_disk_is_full_ends_all_with_its_error(tmp_path):
    fail = {"fail": {"rank": 1, "how": "full"}}
    run = {"folder": str(tmp_path), "name": "full", **OPTIONS, "strategy": "fsdp", "save_steps": 1, **fail}
    log = tmp_path / "log"
    process = launch([run], 2, log)
    try:
        while "FAILING" not in log.read_text(errors="replace"):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            time.sleep(0.1)
        members = family(process)
        assert process.wait(90) != 0
        assert left_of(members) == []
    finally:
        kill_all(process)
    text = log.read_text(errors="replace")
    assert "File too large" in text, text[-4000:]
    left = list((tmp_path / "full").glob("*checkpoint*"))
    assert [path.name for path in left] in ([], ["checkpoint-1"])  # the limit may have come while that was written
    for path in left:
        verify(path)


def test_files_say_which_part_of_the_whole_each_tensor_is(folder):
    offsets = set()
    for file in sorted((folder / "fsdp" / "checkpoint-3" / "resume" / "shards").iterdir()):
        with safe_open(file, framework="pt") as shard:
            info = json.loads(shard.metadata()["DCP_SHARDING_INFO"])
        name = next(key for key in info if key.endswith("dense_h_to_4h.weight"))
        offsets.add(tuple(info[name]["saved_offsets"]))
    assert offsets == {(0, 0), (32, 0)}
