"""Snapshots: what is in them, and that a ring of S + 1 slots keeps what can still be asked for."""

from __future__ import annotations

import json
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.vllm_engine import _process_left_alone, folder_of, gpu_environment
from async_rlhf.models import weights
from async_rlhf.models.publish import BackgroundThread, DeviceRing, SnapshotFolder, SnapshotRing, pinned
from async_rlhf.models.weights import checksum, differing, digests, fold, fold_digests, named_weights
from async_rlhf.system.subprocesses import context_of, start_process


def change(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_last_versions_are_there_unharmed(make_policy, staleness):
    policy = make_policy()
    ring = SnapshotRing.for_model(policy, torch.float32, staleness + 1)
    published = {}
    for version in range(8):
        ring.publish(policy, version)
        published[version] = {name: tensor.clone() for name, tensor in named_weights(policy).items()}
        for kept in range(max(0, version - staleness), version + 1):
            for name, tensor in ring.views(kept).items():
                assert torch.equal(tensor, published[kept][name]), (kept, name)
            assert ring.published[kept] == digests(published[kept])
        assert sorted(ring.published) == list(range(max(0, version - staleness), version + 1))
        change(policy, 0.5)
    ring.close()


def test_another_model_is_read_anew(make_policy):
    """What is read is found once for each model."""
    first, second = make_policy(), make_policy(1)
    ring = SnapshotRing.for_model(first, torch.float32, 2)
    for version, model in enumerate((first, second)):
        ring.publish(model, version)
        assert ring.published[version] == digests(named_weights(model))
    assert ring.published[0] != ring.published[1]
    ring.close()


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_folder_keeps_the_last_versions_as_whole_files(tmp_path, make_policy, staleness):
    policy = make_policy()
    folder = SnapshotFolder(tmp_path / "a" / "run", torch.float32, staleness + 1)
    published = {}
    for version in range(5):
        folder.publish(policy, version)
        assert folder.newest == version
        published[version] = {name: tensor.clone() for name, tensor in named_weights(policy).items()}
        kept = list(range(max(0, version - staleness), version + 1))
        assert sorted(folder.published) == kept
        assert sorted(path.name for path in folder.folder.iterdir()) == [f"version-{v}.safetensors" for v in kept]
        for v in kept:
            assert folder.published[v] == digests(folder.views(v)) == digests(published[v])
        change(policy, 0.5)
    folder.close()
    assert not folder.folder.exists()


def test_a_folder_rounds_parameters_but_no_buffers(tmp_path, make_policy):
    policy = make_policy()
    policy.register_buffer("frequencies", torch.linspace(0, 1, 5))
    folder = SnapshotFolder(tmp_path / "run", torch.bfloat16, 1)
    folder.publish(policy, 0)
    tensors = folder.views(0)
    assert tensors["frequencies"].dtype == torch.float32
    assert {tensor.dtype for name, tensor in tensors.items() if name != "frequencies"} == {torch.bfloat16}
    ring = SnapshotRing.for_model(policy, torch.bfloat16, 1)
    ring.publish(policy, 0)
    assert folder.published[0] == ring.published[0]


def echo(pipe, ring) -> None:
    """In another process: the digests of each version that is asked for, and the newest."""
    while (version := pipe.recv()) is not None:
        pipe.send((digests(ring.views(version)), ring.newest))


@pytest.mark.parametrize("kind", [SnapshotRing, DeviceRing])
def test_another_process_sees_what_is_published(make_policy, kind):
    """A DeviceRing on the CPU goes the same way as on a GPU, but for the handle."""
    policy = make_policy()
    ring = kind.for_model(policy, torch.float32, 2)
    context = context_of()
    ours, theirs = context.Pipe()
    process = context.Process(target=echo, args=(theirs, ring), daemon=True)
    start_process(process, "a reader")
    try:
        for version in range(4):
            ring.publish(policy, version)
            ours.send(version)
            assert ours.poll(60)
            assert ours.recv() == (digests(named_weights(policy)), version)
            change(policy, 0.5)
        ours.send(2)
        assert ours.recv() == (ring.published[2], 3)
    finally:
        ours.send(None)
        process.join(10)
        ring.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_on_the_device_sees_every_bit_and_every_place(dtype):
    """Of words that a lost bit, a swapped pair or a shifted part changes; and however the words are cut into parts."""
    tensor = torch.arange(1, 10 * 37 + 4).to(torch.uint8).view(-1)[: 40 * 4].view(dtype).clone()
    right, data = fold(tensor).tolist(), tensor.view(torch.uint8)
    found = {tuple(right)}
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            found.add(tuple(fold(tensor).tolist()))
            data[place] ^= 1 << bit
    assert len(found) == 1 + 8 * len(data)
    swapped = data.clone()
    swapped[:8], swapped[8:16] = data[8:16].clone(), data[:8].clone()
    assert tuple(fold(swapped.view(dtype)).tolist()) not in found
    assert fold(tensor).tolist() == right
    shifted = torch.cat([tensor[:1], tensor])[1:]  # not at a multiple of 8 bytes
    assert fold(shifted).tolist() == right


def test_a_checksum_on_the_device_does_not_depend_on_its_parts(monkeypatch):
    tensor = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    whole = fold(tensor).tolist()
    monkeypatch.setattr(weights, "_FOLDED", 7)
    assert fold(tensor).tolist() == whole
    assert fold_digests({"a": fold(tensor)}, {"a": tensor}) == digests({"a": tensor}, folded=True)
    assert digests({"a": tensor}, folded=True) != digests({"a": tensor.view(7, 143)}, folded=True)


def test_a_gpu_without_triton_computes_checksums_by_torch_and_says_so(monkeypatch, caplog):
    weights._fold_on.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "async_rlhf.models.fold_kernel", raising=False)
    assert weights._fold_on(torch.device("cuda", 0)) is weights._fold_on(torch.device("cpu"))
    weights._fold_on.cache_clear()
    assert re.search("longer on cuda:0, as their kernel cannot be used: ModuleNotFoundError: .*triton", caplog.text)


def test_vllm_sees_its_own_gpu_alone(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_environment(["cuda:3"]) == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert gpu_environment(["cuda:1"]) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert gpu_environment(["cuda"]) == {"CUDA_VISIBLE_DEVICES": "4"}
    assert gpu_environment(["cuda:1", "cuda:0"]) == {"CUDA_VISIBLE_DEVICES": "6,4"}


def test_buffers_that_decide_the_output_are_in_the_snapshot(make_policy):
    policy, copy = make_policy(), make_policy()
    for model in (policy, copy):
        model.register_buffer("bias", torch.zeros(3, dtype=torch.float64))
        model.register_buffer("scratch", torch.zeros(3), persistent=False)
    ring = SnapshotRing.for_model(policy, torch.bfloat16, 1)
    for version in range(2):
        policy.bias = policy.bias + 7  # another tensor, as a model's own code may put in
        ring.publish(policy, version)
    engine = TransformersEngine(copy, SamplingParams(1, 1.0, 1, (0,), 0))
    assert engine.load(ring.views(1), 1) == ring.published[1]
    assert torch.equal(copy.bias, policy.bias)
    assert "scratch" not in ring.views(0)
    ring.close()


def test_the_checksum_sees_every_kind_of_difference(make_policy):
    weights = {name: tensor.clone() for name, tensor in named_weights(make_policy()).items()}
    square = next(name for name, t in weights.items() if t.dim() == 2 and t.shape[0] == t.shape[1])
    names = list(weights)
    base = checksum(weights)
    assert checksum({name: tensor.clone() for name, tensor in weights.items()}) == base
    assert checksum({**weights, square: weights[square].T}) != base
    assert checksum({**weights, square: weights[square] + 1e-6}) != base
    assert checksum({name: weights[name] for name in names[:-1]}) != base
    assert checksum({name: weights[name] for name in reversed(names)}) != base
    assert checksum({**weights, square: weights[square].view(-1)}) != base


def test_weights_that_do_not_fit_are_named(make_policy):
    engine = TransformersEngine(make_policy(), SamplingParams(1, 1.0, 1, (0,), 0))
    tensors = dict(named_weights(make_policy(1)))
    name, missing = tensors.popitem()
    with pytest.raises(ValueError, match=r"weights of version 3 do not fit the model; differing tensors: " + name):
        engine.load(tensors, 3)
    assert engine.version == 0
    assert engine.load({**tensors, name: missing}, 3)
    assert engine.version == 3


def test_tensors_that_differ_are_named(make_policy):
    weights = named_weights(make_policy())
    names = list(weights)
    expected = digests(weights)
    assert differing(digests(weights), expected) == ""
    changed = {**weights, names[2]: weights[names[2]] + 1}
    assert differing(digests(changed), expected) == f"1 of {len(names)} tensors: {names[2]}"
    missing = {name: weights[name] for name in names[7:]}
    found = differing(digests(missing), expected)
    assert found == f"7 of {len(names)} tensors: {', '.join(names[:5])} and 2 more"


def test_the_thread_that_publishes_is_on_its_ranks_own_gpu(monkeypatch):
    """It begins on GPU 0, where it would open a context for every rank."""
    seen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: seen.append((gpu, threading.current_thread().name)))
    thread = BackgroundThread("publisher")
    thread(lambda: seen.append("works")).result()
    thread.close()
    assert seen == [(3, "publisher_0"), "works"]


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(monkeypatch, caplog):
    pending = []

    def register(*_):
        pending.append("out of memory")
        return 2

    def touch(*_, device):
        pending.clear()
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "zeros", touch)
    with pinned(torch.ones(4)):
        assert not pending
    assert "cannot be pinned (CUDA error 2)" in caplog.text


def test_a_start_of_vllm_leaves_torch_its_threads():
    """On a GPU it sets one thread, for the learner in the same process, too."""
    threads = torch.get_num_threads()
    with _process_left_alone():
        torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads


def test_vllm_finds_what_it_has_compiled_by_the_name_of_a_models_folder(make_policy, tmp_path, monkeypatch):
    """It is the same at every start, another for another model, and nothing else is left."""
    monkeypatch.setenv("ASYNC_RLHF_CACHE", str(tmp_path))
    policy = make_policy()
    spec = ModelSpec(type(policy), policy.config, torch.float32, "cpu")
    folder = folder_of(spec)
    assert folder_of(spec) == folder
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPTNeoXForCausalLM"]
    policy.config.layer_norm_eps *= 2
    assert folder_of(spec) != folder
    assert len(list((tmp_path / "vllm").iterdir())) == 2
