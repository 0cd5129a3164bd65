"""A model that several of vLLM's processes share: their GPUs, their weights, their end. None of it needs vLLM."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
import torch
from tiny import alive

from async_rlhf.config import ConfigError, ParallelConfig, RayConfig, VLLMConfig
from async_rlhf.generation import vllm_engine
from async_rlhf.generation.placement import check_gpus, check_memory, memory_taken, worker_devices
from async_rlhf.generation.vllm_engine import (
    SeveralProcesses,
    end_with,
    load_region,
    tensors_of,
    threads_of_each,
    together,
)
from async_rlhf.models.publish import Region, SnapshotRing
from async_rlhf.models.weights import differing, digests, named_weights
from async_rlhf.system.subprocesses import context_of, start_process

CPU = torch.device("cpu")


def on_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("learner", "device", "gpus", "each", "frozen", "expected"),
    [
        ("cuda:0", None, 5, 2, None, ["43", "21"]),
        ("cuda:0", None, 6, 2, None, ["54", "32", "54"]),
        ("cpu", "cuda", 2, 1, None, ["1", "0"]),
        ("cuda:0", None, 1, 1, None, ["0", "0"]),
        ("cuda:3", None, 4, 1, None, ["2", "1", "0", "2"]),
        ("cuda:0", "cuda:1", 4, 1, None, ["1", "1"]),
        ("cuda:0", None, 4, 2, "cuda:3", ["21"]),
        ("cuda:0", None, 4, 1, "cuda:3", ["2", "1", "2"]),
        ("cuda:0", None, 2, 1, "cuda:1", ["1"]),
        ("cpu", None, 0, 1, None, None),
        ("cuda:0", "cpu", 4, 2, None, None),
    ],
)
def test_each_worker_takes_gpus_that_nobody_else_has(monkeypatch, learner, device, gpus, each, frozen, expected):
    """The last first, and again the first ones for workers beyond the last; a frozen model's only if none is left.
    None stands for the CPU."""
    on_gpus(gpus, monkeypatch)
    numbers = range(len(expected or "12"))
    apart = () if frozen is None else {frozen}
    taken = [worker_devices(device, number, torch.device(learner), each, apart) for number in numbers]
    assert taken == ([("cpu",)] * 2 if expected is None else [tuple(f"cuda:{i}" for i in gpus) for gpus in expected])


def sharded(**generation: object) -> dict[str, object]:
    """Options of generation on two GPUs each."""
    return {"engine": "vllm", "vllm": VLLMConfig(tensor_parallel_size=2), **generation}


@pytest.mark.parametrize(
    ("gpus", "learner", "generation", "staleness", "wrong"),
    [
        (3, "cuda:0", {}, 1, None),
        (2, "cuda:0", {}, 1, "leaves 1 of 2 GPUs, and generation.workers 1 need 2; must be at most 1"),
        (5, "cuda:0", {"workers": 2}, 1, None),
        (4, "cuda:0", {"workers": 2}, 1, "leaves 3 of 4 GPUs, and generation.workers 2 need 4; must be at most 1"),
        (3, "cuda:0", {"workers": 3}, 1, "and generation.workers 3 need 6; must be 1, with fewer generation.workers"),
        (1, "cpu", {"device": "cuda"}, 1, "leaves 1 of 1 GPUs"),
        (0, "cpu", {}, 1, None),
        (1, "cuda:0", {}, 0, "must be at most 1, the GPUs that this process sees"),
        (2, "cuda:0", {}, 0, None),
    ],
)
def test_too_few_gpus_are_an_error_before_anything_is_loaded(
    monkeypatch, make_args, gpus, learner, generation, staleness, wrong
):
    on_gpus(gpus, monkeypatch)
    config = make_args(generation=sharded(**generation), staleness=staleness)
    if wrong is None:
        check_gpus(config, torch.device(learner))
    else:
        with pytest.raises(ConfigError, match=f"^generation.vllm.tensor_parallel_size: got 2; .*{wrong}"):
            check_gpus(config, torch.device(learner))


@pytest.mark.parametrize(
    ("gpus", "on_host", "changes", "right"),
    [
        (2, 2, {}, False),  # a rank on each
        (1, 2, {}, False),  # each rank sees its own GPU alone
        (1, 1, {}, False),  # on each of two hosts
        (2, 2, {"device": "cuda"}, False),
        (3, 2, {}, True),
        (2, 2, {"device": "cuda:0"}, True),  # said aloud
        (2, 2, {"device": "cpu"}, True),
        (2, 2, {"placement": "server", "urls": ["http://127.0.0.1:1"], "engine": "vllm"}, True),
        (2, 2, {"placement": "inline"}, True),
    ],
)
def test_generators_take_no_gpu_of_a_rank_unless_they_are_told_to(
    monkeypatch, make_args, gpus, on_host, changes, right
):
    on_gpus(gpus, monkeypatch)
    monkeypatch.setattr("async_rlhf.generation.placement.launched_on_host", lambda: on_host)
    config = make_args(generation=changes, staleness=1, parallel=ParallelConfig(ranks=2))
    wrong = "^generation.device: got .*; the 2 ranks leave no GPU to generators; must name a GPU that they are to share"
    with nullcontext() if right else pytest.raises(ConfigError, match=wrong):
        check_gpus(config, torch.device("cuda:0"))
    check_gpus(replace(config, parallel=ParallelConfig()), torch.device("cuda:0"))  # one rank shares the only GPU


@pytest.mark.parametrize(
    ("gpus", "share", "changes", "most"),
    [
        (1, 0.9, {}, "a generator and what is trained, or judges, share cuda:0; must be at most 0.8, and leave"),
        (1, 0.5, {"workers": 2}, "2 generators and .* share cuda:0; must be at most 0.4, and leave"),
        (1, 0.3, {}, None),
        (2, 0.9, {}, None),
        (2, 0.6, {"workers": 2}, "2 generators share cuda:1; must be at most 0.5"),
        (3, 0.9, {"workers": 2}, None),
        (2, 0.9, {"device": "cuda:0"}, ".*must be at most 0.8"),
        (3, 0.9, {"device": "cuda:2"}, None),
        (
            3,
            0.9,
            {"device": "cuda:2", "reference_device": "cuda:2"},
            "a generator and .* share cuda:2; must be at most 0.8",
        ),
        (3, 0.8, {"device": "cuda:2", "reference_device": "cuda:2"}, None),
        (3, 0.9, {"device": "cuda:2", "reference_device": "cuda:1"}, None),
        (1, 0.9, {"device": "cpu"}, None),
        (1, 0.9, {"placement": "server", "urls": ["http://127.0.0.1:1"]}, None),
    ],
)
def test_those_who_share_a_gpu_do_not_ask_for_more_than_all_of_it(monkeypatch, make_args, gpus, share, changes, most):
    on_gpus(gpus, monkeypatch)
    vllm, changes = VLLMConfig(gpu_memory_utilization=share), dict(changes)
    place = changes.pop("reference_device", None)
    config = make_args(generation={"engine": "vllm", "vllm": vllm, **changes}, staleness=1, reference_device=place)
    wrong = f"^generation.vllm.gpu_memory_utilization: got {share}; {most}"
    with nullcontext() if most is None else pytest.raises(ConfigError, match=wrong):
        check_memory(config, torch.device("cuda:0"))
    judging = make_args("judged", generation={"engine": "vllm", "vllm": vllm}, staleness=1)
    assert memory_taken(judging, torch.device("cuda:0")) == {f"cuda:{gpus - 1}": share}


def test_generators_that_share_a_gpu_say_how_large_their_caches_are(monkeypatch, make_args):
    """vLLM counts as its own all that leaves a GPU while it starts, another generator's memory too."""
    on_gpus(2, monkeypatch)
    for kv_cache_gb, wrong in (
        (None, pytest.raises(ConfigError, match="kv_cache_gb: got None; must be set: 2 gen")),
        (4, nullcontext()),
    ):
        vllm = VLLMConfig(gpu_memory_utilization=0.5, kv_cache_gb=kv_cache_gb)
        config = make_args(f"{kv_cache_gb}", generation={"engine": "vllm", "vllm": vllm, "workers": 2}, staleness=1)
        with wrong:
            check_memory(config, torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"generation": {"device": "cuda:1"}}, '^device: got .*; must be null, "cpu" or "cuda" with'),
        ({"ray": {"num_gpus": 1.0}}, "^ray.num_gpus: got 1.0; must be 2, as generation.vllm.tensor_parallel_size says"),
        ({"ray": {"num_gpus": 2.0}}, None),
        ({"ray": {}}, None),
    ],
)
def test_keys_that_say_another_number_of_gpus_are_refused(make_args, changes, wrong):
    ray = {"launch": "ray", "ray": RayConfig(**changes["ray"])} if "ray" in changes else {}
    with nullcontext() if wrong is None else pytest.raises(ConfigError, match=wrong):
        make_args(generation=sharded(**changes.get("generation", {})), staleness=1, **ray)


def test_the_threads_of_a_cpu_are_shared():
    assert [threads_of_each(2, n)["OMP_NUM_THREADS"] for n in (1, 4, 5)] == ["1", "2", "2"]


def read(pipe: Connection) -> None:
    """Say what is found in each region that is named, until None comes."""
    while (region := pipe.recv()) is not None:
        pipe.send(digests(tensors_of(region)))


def test_another_process_maps_a_snapshot_by_its_name_alone(make_policy):
    """From the ring itself, and from weights that are in no ring: those are copied once."""
    context, policy = context_of(), make_policy()
    ring = SnapshotRing.for_model(policy, torch.float32, 2)
    ours, theirs = context.Pipe()
    process = context.Process(target=read, args=(theirs,), daemon=True)
    start_process(process, "reader")
    try:
        for version in range(3):
            with torch.no_grad():
                next(policy.parameters()).add_(1)
            ring.publish(policy, version)
            ours.send(ring.views(version).region)
            assert ours.poll(60)
            assert ours.recv() == ring.published[version]
        llm = FakeVLLM(lambda region, folded: (ours.send(region), ours.recv())[1])
        processes = SeveralProcesses(llm)
        for _ in range(2):
            with torch.no_grad():
                next(policy.parameters()).add_(1)
            assert processes.load(named_weights(policy)) == digests(named_weights(policy))
        ours.send(None)
    finally:
        process.join(10)
        ring.close()


class FakeVLLM:
    """As much of ``vllm.LLM`` as weights need, with one process."""

    def __init__(self, load) -> None:
        self._load = load
        self.llm_engine = self.engine_core = self.model_executor = self
        self.workers = ()

    def shutdown(self) -> None:
        """Do nothing."""

    def collective_rpc(self, method, args: tuple[object, ...]) -> list[object]:
        return [self._load(*args)] if isinstance(args[0], Region) else [None]


def test_each_process_computes_the_checksums_of_its_share(monkeypatch):
    """A process that was given other weights has a share whose checksums are not right."""
    calls = []
    monkeypatch.setitem(sys.modules, "async_rlhf.generation.vllm_weights", SimpleNamespace(
        load_weights=lambda worker, tensors, *how: calls.append(how) or {}))  # fmt: skip
    monkeypatch.setattr(vllm_engine, "tensors_of", lambda region: {})
    parallel = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    for rank in range(2):
        load_region(SimpleNamespace(rank=rank, vllm_config=parallel), None, True)
    assert calls == [(True, (0, 2)), (True, (1, 2))]
    right = {"a": "1", "b": "2"}
    assert together([{"a": "1"}, {"b": "2"}]) == right
    assert differing(together([{"a": "1"}, {"b": "3"}]), right) == "1 of 2 tensors: b"
    assert differing(together([{"a": "1"}, {}]), right) == "1 of 2 tensors: b"


def start_another(pipe: Connection) -> None:
    """Start a process that is too busy to end by itself, and tell its number."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        end_with(None, parent)
        while True:
            time.sleep(0.01)
    pipe.send(child)
    time.sleep(600)


def test_a_process_of_vllms_ends_with_the_generator_that_has_started_it():
    context = context_of()
    ours, theirs = context.Pipe()
    process = context.Process(target=start_another, args=(theirs,), daemon=True)
    start_process(process, "generator")
    assert ours.poll(60)
    child = ours.recv()
    os.kill(child, 0)
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)
