"""Weights on their way: by NCCL to processes and to vLLM's servers, and how fast they get there."""

from __future__ import annotations

import json
import re
import secrets
from contextlib import nullcontext
from pathlib import Path

import gloo
import machine
import publish
import pytest
import torch
import torch.distributed as dist
from gpus import (
    BF16_TOLERANCE,
    DEVICE,
    GPU,
    KV_CACHE_GB,
    device,
    device_count,
    largest,
    needs_gpus,
    needs_vllm,
    policy,
    train,
)
from serving import Server

from async_rlhf.generation import broadcast, server_generator
from async_rlhf.generation.server_generator import Sender
from async_rlhf.models import weights
from async_rlhf.models.weights import fold

pytestmark = pytest.mark.gpu
FIGURES = Path(__file__).parents[2] / "runs" / "gpu"


@pytest.mark.parametrize("receivers", [pytest.param(1, marks=needs_gpus(2)), pytest.param(2, marks=needs_gpus(3))])
def test_every_process_gets_every_tensor_by_nccl(receivers, monkeypatch):
    """Three transfers in a row, to as many processes as a server with tensor parallelism has."""
    prepare = None
    if not GPU:
        prepare = gloo.take_nccls_place
        monkeypatch.setattr(dist, "ProcessGroupNCCL", gloo.GlooGroup, raising=False)
        monkeypatch.setattr(broadcast, "by_nccl", lambda device: True)
    memory, specs = publish.packed(
        {
            "large": torch.randn(3000, 1000),
            "half": torch.randn(1001).to(torch.bfloat16),
            "count": torch.arange(3),
            "truth": torch.tensor([True, False, True]),
            "scalar": torch.tensor(2.5),
            "none": torch.empty(0, 4),
            "strided": torch.randn(800, 600).T,
            "last": torch.randn(4000, 1000),
        }
    )
    places = [device(number) for number in range(1, receivers + 1)]
    assert len(publish.send(memory, specs, DEVICE, places, 3, prepare)) == 3


@pytest.mark.parametrize("number", [pytest.param(0, marks=needs_gpus(1)), pytest.param(1, marks=needs_gpus(2))])
def test_checksums_are_the_same_on_a_gpu_as_on_the_host(number):
    """By a kernel of Triton's, on another GPU than the current one too, and on streams."""
    place, random = torch.device(device(number)), torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (40_000_001,), dtype=torch.uint8, generator=random)
    tensors = [data[start:stop] for start, stop in ((0, 0), (0, 3), (0, 64), (1, 30_000), (8, 80_008), (0, None))]
    tensors += [data[: 2 * 3000 * 4096].view(torch.bfloat16).view(3000, 4096).T, torch.tensor(2.5)]
    expected = [fold(tensor).tolist() for tensor in tensors]
    # A part that begins at an odd byte there, too.
    moved = [torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)]).to(place)[1:] for tensor in tensors]
    stream = torch.cuda.Stream(place) if GPU else nullcontext()
    for on in (nullcontext(), torch.cuda.stream(stream) if GPU else stream):
        with on:
            assert [fold(tensor.to(place)).tolist() for tensor in tensors] == expected
            assert [fold(tensor).tolist() for tensor in moved] == expected
    if GPU:
        assert weights._fold_on(place) is not weights._fold_words, "the kernel was refused: the log says why"


@needs_gpus(1)
def test_a_checksum_goes_on_beyond_two_to_the_31_words():
    count = (1 << 31) + 9 if GPU else 9
    if GPU and torch.cuda.mem_get_info(DEVICE)[0] < 20 << 30:
        pytest.skip("needs 20 GiB")
    words = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    words[-1] = 5
    assert fold(words).tolist() == weights._fold_words(words).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with the policy's architecture, for servers."""
    folder = tmp_path_factory.mktemp("model")
    config = policy().config
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(folder)
    return folder


def start(model: Path, gpus: list[int], folder: Path) -> list[Server]:
    """A server on each of these GPUs, all with one key."""
    # With a size for keys and values, servers that start on one GPU at once do not measure each other's memory.
    options: dict[str, object] = {"dtype": "bfloat16", "kv_cache_gb": KV_CACHE_GB}
    options |= {"gpu_memory_utilization": 0.3} if GPU else {"num_threads": 1}
    key = secrets.token_hex(16)
    return [
        Server(model, folder / f"server{i}.log", options, {"CUDA_VISIBLE_DEVICES": str(gpu)} if GPU else {}, key)
        for i, gpu in enumerate(gpus)
    ]


def train_with(servers: list[Server], folder: Path, transport: str, monkeypatch) -> tuple[list[dict[str, float]], list]:
    """Six batches. Also the backend of each transfer by network."""
    backends, invitation = [], Sender.invitation

    def noted(*given):
        found = invitation(*given)
        backends.append(found["backend"])
        return found

    monkeypatch.setattr(server_generator.Sender, "invitation", noted)
    for server in servers:
        server.wait(600.0)
    urls, key = [server.url for server in servers], servers[0].key
    generation = {"engine": "vllm", "placement": "server", "urls": urls, "api_key": key, "dtype": "bfloat16"}
    generation |= {"weights_transport": transport, "mismatch_samples": 16, "timeout": 300.0}
    return train(folder, transport, generation, staleness=1, bf16=True), backends


@needs_vllm
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_gpus(2))], ids=["own_gpu", "other_gpus"])
@needs_gpus(1)
def test_two_servers_take_every_version(model, tmp_path, monkeypatch, apart):
    """By NCCL if they are on other GPUs than the learner, by TCP if they are on its own; and then through a folder.

    Each server's checksums prove what it has loaded, its log-probabilities that it computes with that.
    """
    gpus = ([1, 2] if device_count() > 2 else [1, 1]) if apart else [0, 0]
    servers = start(model, gpus, tmp_path)
    try:
        rows, backends = train_with(servers, tmp_path, "network", monkeypatch)
        assert [row["schedule/version"] for row in rows] == [0, 0, 1, 2, 3, 4]
        assert backends == ["nccl" if GPU and apart else "tcp"] * 2 * 5  # versions 0 to 4, to each server
        assert 0 < largest(rows, "engine/logprob_difference") < BF16_TOLERANCE
        rows, backends = train_with(servers, tmp_path, "folder", monkeypatch)
        assert [row["schedule/version"] for row in rows] == [0, 0, 1, 2, 3, 4]
        assert backends == []
        assert 0 < largest(rows, "engine/logprob_difference") < BF16_TOLERANCE
    finally:
        for server in servers:
            server.kill()


@needs_gpus(1)
def test_what_publishing_takes_is_measured_and_written_down():
    """No time is asserted: the figures go to a file, for people."""
    receivers = min(2, max(1, device_count() - 1))
    found = publish.measure(DEVICE, publish.PYTHIA_410M if GPU else publish.SMALL, 3, receivers)
    assert found["network"] == ("nccl" if GPU and device_count() > receivers else "tcp")
    assert found["ways"].keys() > {"device", "host", "folder", "network", "raw", "checksums"}
    name = machine.name_of(DEVICE)
    FIGURES.mkdir(parents=True, exist_ok=True)
    file = FIGURES / f"publish_{re.sub('[^0-9A-Za-z]+', '_', name).strip('_')}.json"
    file.write_text(json.dumps({"machine": machine.describe(DEVICE), **found}, indent=2) + "\n")
    print(f"\n{name}: {publish.text(found)}\nwritten to {file}")
