"""Sharded checkpoints, written beside training: as exact as whole ones, and nothing that is half written counts."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file
from test_resume import RUNS, StopAfter, assert_same, logs_of, run
from tiny import PROMPTS, byte_tokenizer, count_letters, new_args, new_policy, rare
from transformers import TrainerCallback

from async_rlhf import LoRAConfig, ParallelConfig
from async_rlhf.algorithms.table import BUILT_IN
from async_rlhf.config import ConfigError
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.distributed.parallel import Parallel
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.learner.strategies.deepspeed import ZeRO
from async_rlhf.learner.strategies.fsdp import FullyShardedDataParallel
from async_rlhf.run import async_checkpoint, build, shards
from async_rlhf.run.folder import Checkpoints
from async_rlhf.run.manifest import CheckpointError, require_written, verify
from async_rlhf.run.shards import make_stager
from async_rlhf.run.trainer import OnlineTrainer

STOPS = {
    # What a run saves when it is stopped, and what it is resumed with.
    "online_dpo": ("sharded", "whole"),
    "ppo": ("sharded", "sharded"),
    "ppo_shared_trunk": ("whole", "sharded"),
    "online_dpo_lora": ("sharded", "whole"),
    "ppo_lora": ("sharded", "sharded"),
    "rloo": ("sharded", "sharded"),
}


@pytest.mark.parametrize(
    "name", ["online_dpo", rare("ppo"), "ppo_shared_trunk", rare("online_dpo_lora"), "ppo_lora", rare("rloo")]
)
def test_a_run_that_was_saved_in_shards_is_the_uninterrupted_one(make_policy, tokenizer, prompts, make_args, name):
    first, then = STOPS[name]
    algorithm = next(a for a in BUILT_IN if name.startswith(a))
    options = {"algorithm": algorithm, "staleness": 1, "num_samples_logged": 100, "save_steps": 4, **RUNS[name]}
    whole = run(make_policy, tokenizer, prompts, make_args("whole", **options), name)
    stopped = make_args("stopped", checkpoint_format=first, **options)
    run(make_policy, tokenizer, prompts, stopped, name, callbacks=[StopAfter(3)])
    checkpoint = Path(stopped.output_dir) / "checkpoint-3"
    verify(checkpoint)
    assert (checkpoint / "resume" / "shards").is_dir() == (first == "sharded")
    resumed = make_args("stopped", resume=True, checkpoint_format=then, **options)
    assert_same(run(make_policy, tokenizer, prompts, resumed, name), whole)
    # What others read of a checkpoint is the same, file by file.
    ours, theirs = (Path(args.output_dir) / "checkpoint-4" for args in (resumed, make_args("whole", **options)))
    for path in theirs.rglob("*"):
        own = path.relative_to(theirs)
        if path.is_file() and own.parts[0] != "resume" and path.name not in ("manifest.json", "trainer_state.json"):
            assert (ours / own).read_bytes() == path.read_bytes() or path.name == "README.md", own


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "adamw_8bit"])
def test_every_optimizer_goes_into_shards(make_policy, tokenizer, prompts, make_args, optimizer):
    if optimizer == "adamw_8bit":  # its tensors of 4,096 numbers or more, of which this policy has many, share tables
        pytest.importorskip("bitsandbytes")
        make_policy = partial(new_policy, hidden_size=64)
    options = {"optimizer": optimizer}
    whole = run(make_policy, tokenizer, prompts, make_args("whole", **options))
    stopped = make_args("stopped", checkpoint_format="sharded", **options)
    run(make_policy, tokenizer, prompts, stopped, callbacks=[StopAfter(3)])
    resumed = make_args("stopped", resume=True, checkpoint_format="sharded", **options)
    assert_same(run(make_policy, tokenizer, prompts, resumed), whole)


def test_an_own_optimizer_goes_into_shards(make_policy, tokenizer, prompts, make_args):
    def trained(name: str, **changes):
        policy = make_policy()
        callbacks = changes.pop("callbacks", [])
        options = {"optimizers": (torch.optim.SGD(policy.parameters(), lr=0.05, momentum=0.9), None)}
        args = make_args(name, checkpoint_format="sharded", **changes)
        return run(lambda: policy, tokenizer, prompts, args, callbacks=callbacks, **options)

    whole = trained("whole")
    trained("stopped", callbacks=[StopAfter(3)])
    assert_same(trained("stopped", resume=True), whole)


class Noted(torch.optim.SGD):
    """Keeps a text for each parameter."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["note"] = "moved"


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_an_optimizer_whose_state_is_no_tensor_is_refused_by_name(make_policy, tokenizer, prompts, make_args, kind):
    policy = make_policy()
    args = make_args(checkpoint_format=kind, save_steps=1)
    options = {"optimizers": (Noted(policy.parameters(), lr=0.05, momentum=0.9), None)}
    trainer = OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer, **options)
    with pytest.raises(TypeError, match="optimizers: got Noted whose 'note' is a str; must hold tensors and integers"):
        trainer.train()


class Held(TrainerCallback):
    """Lets the checkpoint after a batch be written only when the next batch has been trained on.

    Args:
        batch: the number of the batch.
        monkeypatch: undoes it.
    """

    def __init__(self, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batch, self.go, self.seen = batch, threading.Event(), []
        write = async_checkpoint.write_shards

        def held(state, folder, *arguments):
            if folder.parts[-3] == f".checkpoint-{batch}.tmp":
                assert self.go.wait(60)
            return write(state, folder, *arguments)

        monkeypatch.setattr(async_checkpoint, "write_shards", held)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.batch + 1:
            self.seen = sorted(path.name for path in Path(args.output_dir).glob("*checkpoint*"))
            self.go.set()


def test_a_checkpoint_is_of_the_batch_at_which_it_was_asked_for(
    make_policy, tokenizer, prompts, make_args, monkeypatch
):
    """Although the weights, the moments and the callbacks' state have changed before a byte is written."""
    whole = run(make_policy, tokenizer, prompts, make_args("whole", save_steps=2))
    saved_late(make_policy, tokenizer, prompts, make_args, monkeypatch)
    late, asked = (Path(make_args(name).output_dir) / "checkpoint-2" for name in ("late", "whole"))
    assert (late / "model.safetensors").read_bytes() == (asked / "model.safetensors").read_bytes()
    resumed = run(make_policy, tokenizer, prompts, make_args("again", resume_from=str(late)))
    assert resumed[1] == whole[1][2:]
    assert_same((resumed[0], [], []), (whole[0], [], []))


def saved_late(make_policy, tokenizer, prompts, make_args, monkeypatch) -> None:
    held = Held(2, monkeypatch)
    args = make_args("late", checkpoint_format="sharded", save_steps=2)
    run(make_policy, tokenizer, prompts, args, callbacks=[held])
    assert held.seen == [".checkpoint-2.tmp"]  # it was being written when batch 3 had been trained on


def test_the_checkpoint_before_stays_until_the_next_is_whole(make_policy, tokenizer, prompts, make_args, monkeypatch):
    """And callbacks hear of each when it is whole, with its own batch."""
    told = []

    class Told(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            verify(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            told.append(state.global_step)

    held = Held(4, monkeypatch)
    args = make_args(checkpoint_format="sharded", save_steps=2, save_total_limit=1)
    run(make_policy, tokenizer, prompts, args, callbacks=[held, Told()])
    assert held.seen == [".checkpoint-4.tmp", "checkpoint-2"]
    assert told == [2, 4, 6]
    assert sorted(path.name for path in Path(args.output_dir).glob("*checkpoint*")) == ["checkpoint-6"]


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(make_policy, tokenizer, prompts, make_args):
    """A limit on the size of files stands for the full disk. The run ends after the next batch, or with it."""
    options = {"checkpoint_format": "sharded", "save_steps": 2}
    whole = run(make_policy, tokenizer, prompts, make_args("whole", **options), reward=count_letters)

    class Fill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                deadline = time.monotonic() + 60  # the checkpoint before is written beside training
                while Checkpoints(Path(args.output_dir)).newest_whole() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

    args = make_args("full", **options)
    trainer = OnlineTrainer(
        make_policy(), args, prompts, reward_funcs=count_letters, processing_class=tokenizer, callbacks=[Fill()]
    )
    try:
        with pytest.raises(OSError, match=r"File too large.*checkpoint-4"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    folder = Path(args.output_dir)
    assert sorted(path.name for path in folder.glob("*checkpoint*")) == ["checkpoint-2"]
    assert logs_of(args)[0][-1]["batch"] in (4, 5, 6)  # it may have written much before it fails
    again = make_args("full", resume=True, **options)
    assert_same(run(make_policy, tokenizer, prompts, again, reward=count_letters), whole)


def test_an_error_elsewhere_lets_the_checkpoint_be_finished(make_policy, tokenizer, prompts, make_args, monkeypatch):
    """What would have been on disk by then if training had waited is not lost."""

    class Breaks(Held):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                threading.Timer(0.2, self.go.set).start()
                raise ArithmeticError("in the fifth batch")

    args = make_args(checkpoint_format="sharded", save_steps=2)
    trainer = OnlineTrainer(
        make_policy(),
        args,
        prompts,
        reward_funcs=count_letters,
        processing_class=tokenizer,
        callbacks=[Breaks(4, monkeypatch)],
    )
    with pytest.raises(ArithmeticError, match="in the fifth batch"):
        trainer.train()
    checkpoints = Checkpoints(Path(args.output_dir))
    assert checkpoints.newest_whole() == checkpoints.path(4)


KILLED = """
import os, signal, sys
from pathlib import Path

import torch
from tiny import PROMPTS, THREADS, byte_tokenizer, count_letters, new_args, new_policy

from async_rlhf.run import async_checkpoint
from async_rlhf.run.trainer import OnlineTrainer

torch.set_num_threads(THREADS)
seal = async_checkpoint.seal


def kill(folder, known):
    if folder.name == ".checkpoint-4.tmp":  # all files are there but the manifest
        os.kill(os.getpid(), signal.SIGKILL)
    seal(folder, known)


async_checkpoint.seal = kill
args = new_args(Path(sys.argv[1]), "killed", checkpoint_format="sharded", save_steps=2)
OnlineTrainer(
    new_policy(), args, PROMPTS, reward_funcs=count_letters, processing_class=byte_tokenizer()
).train()
"""


def test_a_run_killed_before_a_checkpoint_is_whole_goes_on_from_the_one_before(tmp_path, caplog):
    caplog.set_level("INFO")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])}
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = tmp_path / "killed"
    assert sorted(path.name for path in folder.glob("*checkpoint*")) == [".checkpoint-4.tmp", "checkpoint-2"]
    assert list((folder / ".checkpoint-4.tmp" / "resume" / "shards").iterdir())

    def trained(name: str, **changes):
        args = new_args(tmp_path, name, checkpoint_format="sharded", save_steps=2, **changes)
        trainer = OnlineTrainer(
            new_policy(), args, PROMPTS, reward_funcs=count_letters, processing_class=byte_tokenizer()
        )
        trainer.train()
        return trainer, *logs_of(args)

    assert_same(trained("killed", resume=True), trained("whole"))
    assert "resuming after batch 2" in caplog.text
    assert sorted(path.name for path in folder.glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


@pytest.fixture
def checkpoint(make_policy, tokenizer, prompts, make_args) -> Path:
    args = make_args("first", staleness=1, checkpoint_format="sharded")
    run(make_policy, tokenizer, prompts, args, callbacks=[StopAfter(2)])
    return Path(args.output_dir) / "checkpoint-2"


def test_shards_are_no_pickles_and_an_older_version_refuses_them(checkpoint):
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".safetensors", ".jinja", ".md"}
    (file,) = (checkpoint / "resume" / "shards").iterdir()
    kinds = {name.partition(".")[0] for name in load_file(file)}
    assert kinds == {"weight", "optimizer"}
    assert json.loads((checkpoint / "resume" / "state.json").read_text())["format"] == "3, sharded"


def test_large_shards_are_several_files(make_policy, tokenizer, prompts, make_args, monkeypatch):
    """A file's bytes are put together in memory before they are written."""
    monkeypatch.setattr(shards, "_FILE_BYTES", 50_000)
    options = {"checkpoint_format": "sharded", "save_steps": 3}
    whole = run(make_policy, tokenizer, prompts, make_args("whole", **options))
    checkpoint = Path(whole[0].args.output_dir) / "checkpoint-3"
    files = sorted((checkpoint / "resume" / "shards").iterdir())
    sizes = [path.stat().st_size for path in files]
    assert len(sizes) > 4
    assert max(sizes) < 60_000
    assert all(one + next_one > 50_000 for one, next_one in pairwise(sizes))  # none is begun before it must be
    count = len(files)
    assert [f.stem for f in files] == [f"shard-00001-model-{n:05}-of-{count:05}" for n in range(1, count + 1)]
    again = run(make_policy, tokenizer, prompts, make_args("again", resume_from=str(checkpoint), **options))
    assert_same((again[0], [], []), (whole[0], [], []))


def test_what_files_hold_is_found_out_once_for_a_model(checkpoint, monkeypatch):
    """However often weights are read, a few at a time."""
    opened, safe_open, folder = [], safetensors.safe_open, checkpoint / "resume" / "shards"
    (file,) = folder.iterdir()
    names = [name.removeprefix("weight.policy.") for name in load_file(file) if name.startswith("weight.policy.")]
    monkeypatch.setattr(shards, "READ_BYTES", 1)
    monkeypatch.setattr(safetensors, "safe_open", lambda *a, **b: opened.append(1) or safe_open(*a, **b))
    assert [name for name, _ in shards.whole_weights(folder, "policy.", names)] == names
    assert len(opened) == 1 + len(names) > 3


def test_what_all_ranks_hold_is_shared_out(make_policy, tokenizer, prompts, make_args):
    """Rank 0 writes the weights; the moments go where least is written, so that all write about as much."""
    learner = run(make_policy, tokenizer, prompts, make_args(total_episodes=8))[0].learner
    whole = shards.own_state(learner)
    largest = max(tensor.nbytes for tensor in whole.values())
    for count in (2, 3):
        parts = []
        for rank in range(count):
            learner.ranks = Ranks(rank, count)
            parts.append(shards.own_state(learner))
        assert sorted(name for part in parts for name in part) == sorted(whole)
        assert {name for name in whole if name.startswith("weight.")} <= parts[0].keys()
        sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
        assert max(sizes) - min(sizes) <= largest


def test_a_damaged_shard_is_found(checkpoint, make_policy, tokenizer, prompts, make_args):
    (file,) = (checkpoint / "resume" / "shards").iterdir()
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match=r"resume_from: .*shard-.* is not what was written: its checksum differs"):
        run(make_policy, tokenizer, prompts, make_args(resume_from=str(checkpoint)))


def test_shards_of_other_weights_are_refused(checkpoint, make_policy, tokenizer, prompts, make_args):
    learner = OnlineTrainer(
        make_policy(),
        make_args("ppo", algorithm="ppo"),
        prompts,
        reward_funcs=count_letters,
        processing_class=tokenizer,
    ).learner
    with pytest.raises(CheckpointError, match=r"shards' holds other weights than are trained, such as weight\.value\."):
        shards.load_shards(learner, checkpoint / "resume" / "shards")
    empty = checkpoint.parent / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="empty' holds other weights than are trained"):
        shards.load_shards(learner, empty)


@pytest.mark.parametrize(
    ("asked", "kind", "parameters", "shards"),
    [
        ("auto", FullyShardedDataParallel, 8_000_000_000, True),
        ("auto", FullyShardedDataParallel, 1_000_000_000, False),
        ("auto", Parallel, 8_000_000_000, False),
        ("whole", FullyShardedDataParallel, 8_000_000_000, False),
        ("sharded", Parallel, 1, True),
    ],
)
def test_large_policies_of_fsdp_are_not_gathered_by_themselves(make_args, asked, kind, parameters, shards):
    args = make_args(checkpoint_format=asked)
    assert async_checkpoint.writes_shards(args, kind, parameters) is shards
    offloads = replace(args, parallel=ParallelConfig(cpu_offload=True))
    assert async_checkpoint.writes_shards(offloads, kind, parameters) is (asked == "sharded")

    class Spread(ZeRO):
        is_sharded = True  # as its third stage is

    assert async_checkpoint.writes_shards(args, Spread, parameters) is (asked == "sharded")


@pytest.mark.parametrize("rank", [0, 2])
def test_large_is_what_is_trained_and_not_what_is_below_adapters(
    make_policy, tokenizer, prompts, make_args, monkeypatch, rank
):
    policy = make_policy()
    args = make_args(lora=LoRAConfig(rank=rank), save_steps=1)
    trainer = OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer)
    monkeypatch.setattr(async_checkpoint, "_LARGE", sum(each.numel() for each in policy.parameters()) // 2)
    monkeypatch.setattr(trainer.learner.parallel, "is_sharded", True)
    with async_checkpoint.saving(trainer.run) as saves:
        assert (saves is None) is (rank > 0)


def test_zero_neither_writes_shards_nor_reads_them(checkpoint, make_policy, tokenizer, prompts, make_args, monkeypatch):
    for strategy in ("zero1", "zero2", "zero3"):
        with pytest.raises(
            ConfigError, match=rf'checkpoint_format: got \'sharded\'; must be "whole" or "auto" with .*{strategy}'
        ):
            make_args(checkpoint_format="sharded", parallel=ParallelConfig(strategy, ranks=2), total_episodes=96)

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for ranks, refused in ((1, False), (2, True)):
        args = make_args(checkpoint_format="sharded", parallel=ParallelConfig(ranks=ranks), total_episodes=96)
        right = 'must be "whole" or "auto" with parallel.strategy "zero2"'
        with pytest.raises(ConfigError, match=right) if refused else nullcontext():
            make_parallel(args, Ranks(0, ranks))

    class Zero(Parallel):
        takes_shards = False

    monkeypatch.setattr(build, "make_parallel", lambda config, ranks: Zero(ranks))
    monkeypatch.setattr(build, "load_models", partial(pytest.fail, "models were loaded"))
    with pytest.raises(
        ConfigError, match=r'parallel.strategy: got .auto.; must be "ddp" or "fsdp" to go on from .*-2,'
    ):
        run(make_policy, tokenizer, prompts, make_args(staleness=1, resume_from=str(checkpoint)))


def test_copies_are_made_into_the_same_memory_each_time():
    """A host would else spend the time of a copy on getting memory for it."""
    stager, weight = make_stager(torch.device("cpu")), torch.nn.Parameter(torch.ones(3))
    first = stager.stage({"weight": weight.detach()})["weight"]
    place = first.data_ptr()
    assert place != weight.data_ptr()
    with torch.no_grad():
        weight.add_(1)
    assert first.tolist() == [1, 1, 1]
    second = stager.stage({"weight": weight.detach()})["weight"]
    assert second.data_ptr() == place
    assert second.tolist() == [2, 2, 2]


def test_files_that_another_rank_has_written_must_be_seen_here(tmp_path):
    (tmp_path / "here").write_text("abc")
    require_written(tmp_path, {"here": "3 bytes, xxh3 0"})
    for name, digest in (("there", "3 bytes, xxh3 0"), ("here", "4 bytes, xxh3 0")):
        with pytest.raises(OSError, match=f"{name}', which another rank has written, is not there; must be on a file"):
            require_written(tmp_path, {name: digest})
