"""Publishing beside training: weights may change as soon as ``publish`` returns, and nobody reads half a version."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tiny import all_drawn, count_letters, rare

from async_rlhf.config import GenerationConfig
from async_rlhf.data.stream import PromptStream
from async_rlhf.distributed.parallel import ALONE
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import Request, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.worker import build_handler
from async_rlhf.models import publish
from async_rlhf.models.publish import AsyncCopy, BackgroundThread, SnapshotFolder, SnapshotRing
from async_rlhf.models.weights import digests, named_weights
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.system.trace import Trace

PARAMS = SamplingParams(2, 0.7, 8, (256,), 0)


def zero(policy) -> None:
    """What no update would do: all weights at once, in place."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()


@pytest.fixture
def delayed(monkeypatch):
    """What the thread does begins late. Returns a function that sets the seconds."""
    finish, seconds = SnapshotRing.make_available, [0.0]

    def finish_late(ring, version):
        time.sleep(seconds[0])
        finish(ring, version)

    monkeypatch.setattr(SnapshotRing, "make_available", finish_late)
    return lambda value: seconds.__setitem__(0, value)


@pytest.fixture
def generator(make_policy, make_args):
    """One that compares nothing with the policy, which these tests spoil."""
    silent = {"placement": "process", "mismatch_samples": 0, "probe_steps": 0, "timeout": 120.0}
    with closing(ProcessGenerator(make_args(generation=silent), make_policy(), PARAMS, Trace())) as made:
        yield made


def sampled_by_the_published(generator, policy, prompts) -> None:
    """Require that version 0 samples as the policy did when it was published."""
    expected = TransformersEngine(policy, PARAMS).generate(prompts)
    weights = digests({name: tensor.clone() for name, tensor in named_weights(policy).items()})
    generator.publish(policy, 0)
    zero(policy)
    generator.submit(1, 0, prompts)
    batch = generator.collect(1)
    assert generator.snapshots.published[0] == weights
    assert all_drawn([group.samples for group in batch.groups]) == all_drawn(expected)


def test_weights_may_change_as_soon_as_publish_returns(generator, make_policy, tokenizer, prompts, delayed):
    delayed(1.0)
    asked, started = PromptStream(prompts, tokenizer).batch(1, 4), time.monotonic()
    sampled_by_the_published(generator, make_policy(), asked)
    assert time.monotonic() - started > 1.0


def test_without_the_copy_the_workers_get_the_changed_weights(
    generator, make_policy, tokenizer, prompts, delayed, monkeypatch
):
    """The fault that the law forbids: the thread reads what is being trained."""

    def late(leaving, tensor, place, name=None):
        leaving._later(lambda: (time.sleep(0.1), place.copy_(tensor)))

    monkeypatch.setattr(AsyncCopy, "copy", late)
    asked = PromptStream(prompts, tokenizer).batch(1, 4)
    with pytest.raises(AssertionError):
        sampled_by_the_published(generator, make_policy(), asked)


@pytest.mark.parametrize("kind", ["ring", "folder"])
def test_a_version_counts_when_it_is_whole(make_policy, tmp_path, kind):
    policy = make_policy()
    snapshots = SnapshotRing.for_model(policy, torch.bfloat16, 2)
    if kind == "folder":
        snapshots = SnapshotFolder(tmp_path / "weights", torch.bfloat16, 2)
    with closing(snapshots):
        assert snapshots.newest == -1
        for version in range(5):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.fill_(version + 1)
            work, before = [], dict(snapshots.published)
            snapshots.publish(policy, version, ALONE, work.append)
            assert snapshots.newest == version - 1
            assert version not in snapshots.published
            assert before.keys() - snapshots.published.keys() <= {version - 2}
            zero(policy)
            for part in work:
                part()
            assert snapshots.newest == version
            assert sorted(snapshots.published) == list(range(max(0, version - 1), version + 1))
            for kept, expected in snapshots.published.items():
                tensors = snapshots.views(kept)
                assert digests(tensors) == expected
                assert {float(x) for tensor in tensors.values() for x in tensor.flatten()} == {kept + 1.0}


@pytest.mark.parametrize("version", [1, None])
def test_a_worker_waits_for_weights_that_are_on_their_way(make_policy, tokenizer, prompts, version):
    """A request that names no version is for the newest when it was sent, or a newer one."""
    policy, work = make_policy(), []
    with closing(SnapshotRing.for_model(policy, torch.float32, 2)) as ring:
        ring.publish(policy, 0)
        ring.publish(make_policy(1), 1, ALONE, work.append)
        signs: list[float] = []
        spec = ModelSpec(type(policy), policy.config, torch.float32, "cpu")
        handler = build_handler(spec, PARAMS, ring, lambda: signs.append(time.monotonic()))
        request = Request(1, 0, version, PromptStream(prompts, tokenizer).batch(1, 2), after=1)
        replies = []
        thread = threading.Thread(target=lambda: replies.append(handler.answer(request)))
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        assert signs, "one that waits is alive"
        assert replies == []
        for part in work:
            part()
        thread.join(60)
        assert replies[0].version == 1
        assert replies[0].digests == {1: ring.published[1]}


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["ring", "folded", "folder"])
def test_a_version_is_seen_when_its_checksums_are_there(make_policy, tmp_path, monkeypatch, kind):
    """Who reads the number of the newest looks up its checksums at once."""
    seen: list[int] = []

    def looking(compute):
        return lambda *given, **known: (seen.append(snapshots.newest), compute(*given, **known))[1]

    policy = make_policy()
    folder = SnapshotFolder(tmp_path / "published", torch.float32, 2)
    snapshots = folder if kind == "folder" else SnapshotRing.for_model(policy, torch.float32, 2)
    snapshots.folded = kind == "folded"
    with closing(snapshots):
        for name in ("digests", "fold_digests"):
            monkeypatch.setattr(publish, name, looking(getattr(publish, name)))
        for version in range(3):
            with closing(BackgroundThread("publisher")) as thread:
                snapshots.publish(policy, version, ALONE, thread)
                thread.finish()
            assert (snapshots.newest, version in snapshots.published) == (version, True)
        assert seen == [-1, 0, 1]


def test_after_an_error_the_thread_does_nothing_more():
    """What comes after it builds on what was not done."""
    done: list[int] = []

    def fail():
        raise OSError("no room")

    with closing(BackgroundThread("publisher")) as thread:
        for work in (lambda: done.append(1), fail, lambda: done.append(2)):
            thread(work)
        with pytest.raises(OSError, match="no room"):
            thread.finish()
        thread(lambda: done.append(3)).result()
        with pytest.raises(OSError, match="no room"):
            thread.require()
    assert done == [1]


@pytest.mark.parametrize("asks", ["collect", "publish"])
def test_an_error_in_the_thread_is_raised_with_its_own_traceback(
    generator, make_policy, tokenizer, prompts, monkeypatch, asks
):
    def fail(ring, version):
        raise OSError(f"version {version} found no room")

    monkeypatch.setattr(SnapshotRing, "make_available", fail)
    policy, started = make_policy(), time.monotonic()
    generator.publish(policy, 0)
    generator.submit(1, 0, PromptStream(prompts, tokenizer).batch(1, 4))
    with pytest.raises(OSError, match="version 0 found no room") as caught:
        generator.collect(1) if asks == "collect" else generator.publish(policy, 1)
    assert "fail" in [entry.name for entry in caught.traceback]
    assert time.monotonic() - started < 60
    assert generator.snapshots.newest == -1


def run(make_policy, tokenizer, prompts, args):
    policy = make_policy()
    OnlineTrainer(policy, args, prompts, reward_funcs=count_letters, processing_class=tokenizer).train()
    lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if "time/" not in k and k != "eps"} for line in lines]
    return policy.state_dict(), rows, Path(args.output_dir)


@pytest.mark.parametrize("staleness", [rare(0), 1, 2])
def test_a_slow_thread_changes_no_number(make_policy, tokenizer, prompts, make_args, delayed, staleness):
    generation = GenerationConfig(placement="process", response_length=12, num_threads=1)
    weights, rows, _ = run(
        make_policy, tokenizer, prompts, make_args("quick", staleness=staleness, generation=vars(generation))
    )
    delayed(0.3)
    args = make_args("slow", staleness=staleness, generation=vars(generation), save_steps=2)
    later, same_rows, folder = run(make_policy, tokenizer, prompts, args)
    assert same_rows == rows
    for name, tensor in weights.items():
        assert torch.equal(tensor, later[name]), name
    delayed(0.0)
    source = str(sorted(folder.glob("checkpoint-*"))[0])
    args = make_args("resumed", staleness=staleness, generation=vars(generation), resume_from=source)
    again, resumed_rows, _ = run(make_policy, tokenizer, prompts, args)
    assert resumed_rows == rows[-len(resumed_rows) :]
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name]), name


def test_a_worker_that_dies_while_it_waits_samples_the_same(generator, make_policy, tokenizer, prompts, delayed):
    delayed(2.0)
    policy, asked = make_policy(), PromptStream(prompts, tokenizer).batch(1, 4)
    expected = TransformersEngine(policy, PARAMS).generate(asked)
    generator.publish(policy, 0)
    generator.submit(1, 0, asked)
    time.sleep(1)
    os.kill(generator.workers[0].process.pid, signal.SIGKILL)
    batch = generator.collect(1)
    assert generator.supervisor.restarts == 1
    assert all_drawn([group.samples for group in batch.groups]) == all_drawn(expected)
