"""How fast new weights leave the learner: GB/s of the weights as they are published, in bfloat16.

    python benchmarks/publish.py [--device cuda:0] [--model 410m] [--receivers 1] [--rounds 5] [--json]

A GPT-NeoX with float32 weights, of 76 tensors, of 292 small ones, or of the size of Pythia 410m. Every way that is the
run's includes rounding and checksums:

    device     DeviceRing: for generators on the learner's own GPU
    host       SnapshotRing: for other processes of this host
    folder     SnapshotFolder: for servers that share a file system
    network    from the host's copy to receivers in processes of their own until each has everything: by NCCL if there
               is a GPU for each receiver beside the learner's, else by TCP; all rounds over the same connections
    raw        torch's broadcast of as many bytes, from one piece of memory into another, by NCCL or Gloo

    rounding, to the host, checksums, to the device: these parts of it alone, one after the other; checksums where the
               run computes them, on a GPU or on the host

The first round of each warms up and is shown by itself. "Stall" is what the learner waits for: until publish() returns,
with a thread that does the rest.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import machine
import torch
from smallest import parse
from torch import Tensor
from transformers import GPTNeoXForCausalLM
from workload import neox

from async_rlhf.distributed.parallel import ALONE
from async_rlhf.generation import broadcast
from async_rlhf.generation.broadcast import Receiver, Sender
from async_rlhf.models.publish import (
    BackgroundThread,
    DeviceRing,
    SnapshotFolder,
    SnapshotRing,
    Snapshots,
    TensorSpec,
    tensors_in,
)
from async_rlhf.models.weights import digests

Sizes = tuple[int, int, int, int]
PYTHIA_410M, SMALL = (50304, 1024, 24, 16), (4096, 256, 6, 8)
"""Vocabulary, width, layers and heads."""
MODELS = {"410m": PYTHIA_410M, "292 tensors": (4096, 256, 24, 8), "small": SMALL}
Prepare = Callable[[], None]


def measure(device: str, sizes: Sizes, rounds: int, receivers: int) -> dict[str, Any]:
    """Seconds and GB/s of every way.

    Raises:
        RuntimeError: a receiver's tensors are not those that were sent.
    """
    model = neox(*sizes).to(device)
    ways: dict[str, list[float]] = {}
    stalls: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        host = SnapshotRing.for_model(model, torch.bfloat16, 2)
        kinds = {
            "device": DeviceRing.for_model(model, torch.bfloat16, 2),
            "host": host,
            "folder": SnapshotFolder(Path(folder) / "snapshots", torch.bfloat16, 2),
        }
        for name, snapshots in kinds.items():
            ways[name] = [
                machine.seconds(lambda s=snapshots, v=v: s.publish(model, v), device) for v in range(rounds + 1)
            ]
            stalls[name] = statistics.median(_stall(snapshots, model, rounds + 1 + v) for v in range(rounds))
        size = sum(tensor.nbytes for tensor in host.views(0).values())
        gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
        own = [i for i in range(gpus) if i != (torch.device(device).index or 0)][:receivers]
        by_nccl = gpus > 0 and len(own) == receivers
        places = [f"cuda:{i}" for i in own] if by_nccl else ["cpu"] * receivers
        place = device if by_nccl else "cpu"
        ways["network"] = send(host.slot(2 * rounds), host.specs, place, places, rounds + 1)
        ways["raw"] = raw(size, place, places, rounds + 1)
        for name, part in parts(model, host, device).items():
            ways[name] = [machine.seconds(part, device) for _ in range(rounds + 1)]
        for snapshots in kinds.values():
            snapshots.close()
    return {
        "gigabytes": size / 1e9,
        "tensors": len(host.specs),
        "receivers": receivers,
        "network": "nccl" if by_nccl else "tcp",
        "ways": {
            name: {
                "first_seconds": seconds[0],
                "seconds": statistics.median(seconds[1:]),
                "gb_per_second": size / 1e9 / statistics.median(seconds[1:]),
                **({"stall_seconds": stalls[name]} if name in stalls else {}),
            }
            for name, seconds in ways.items()
        },
    }


def _stall(snapshots: Snapshots, model: GPTNeoXForCausalLM, version: int) -> float:
    beside = BackgroundThread("publisher")
    started = time.perf_counter()
    snapshots.publish(model, version, ALONE, beside)
    seconds = time.perf_counter() - started
    beside.finish()
    beside.close()
    return seconds


def parts(model: GPTNeoXForCausalLM, host: SnapshotRing, device: str) -> dict[str, Callable[[], Any]]:
    """What a version's way to a generator of this host consists of."""
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    views = host.views(0)

    def copy(sources: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
        for name in sources.keys() & places.keys():
            places[name].copy_(sources[name], non_blocking=True)

    return {
        "rounding": lambda: copy(model.state_dict(), rounded),
        "to the host": lambda: copy(rounded, views),
        "checksums": lambda: digests(rounded, folded=True) if device.startswith("cuda") else digests(views),
        "to a device": lambda: copy(views, rounded),
    }


def send(
    memory: Tensor,
    specs: Sequence[TensorSpec],
    device: str,
    receivers: Sequence[str],
    rounds: int,
    prepare: Prepare | None = None,
) -> list[float]:
    """Send tensors to a process on each of these devices. Returns the seconds of each round.

    Args:
        memory: of the tensors, on the host.
        specs: their places in it.
        device: of the learner's end.
        receivers: devices, one for each process.
        rounds: how often.
        prepare: called first in each process.

    Raises:
        RuntimeError: a receiver's tensors are not those that were sent.
    """
    expected, found = digests(tensors_in(memory, specs)), []
    sender = Sender("http://127.0.0.1:80", len(receivers), torch.device(device))
    with _processes(_receive, receivers, prepare) as pipes:
        for _ in range(rounds):
            started = time.perf_counter()
            invitation = sender.invitation(specs)
            for pipe in pipes:
                pipe.send(invitation)
            sender.send(memory, specs)
            answers = [pipe.recv() for pipe in pipes]
            found.append(max(taken for taken, _ in answers) - started)
            for rank, (_, got) in enumerate(answers, start=1):
                if got != expected:
                    raise RuntimeError(f"receiver {rank} got other tensors than were sent")
    sender.close()
    return found


def packed(tensors: Mapping[str, Tensor]) -> tuple[Tensor, tuple[TensorSpec, ...]]:
    """Tensors as they lie in a snapshot: their memory, and their places in it."""
    specs, end = [], 0
    for name, tensor in tensors.items():
        specs.append(TensorSpec(name, tuple(tensor.shape), tensor.dtype, -(-end // 64) * 64))
        end = specs[-1].end
    memory = torch.zeros(end, dtype=torch.uint8)
    for name, place in tensors_in(memory, specs).items():
        place.copy_(tensors[name])
    return memory, tuple(specs)


def raw(size: int, device: str, receivers: Sequence[str], rounds: int) -> list[float]:
    """Broadcast as many bytes, in parts as large as a bucket. Returns the seconds of each round."""
    found = []
    with tempfile.TemporaryDirectory() as folder, _processes(_take_raw, receivers, folder, size) as pipes:
        group = _raw_group(folder, 0, len(receivers) + 1, device)
        memory = torch.zeros(size, dtype=torch.uint8, pin_memory=device.startswith("cuda"))
        for _ in range(rounds):
            started = time.perf_counter()
            for pipe in pipes:
                pipe.send("")
            _broadcast(group, [part.to(device, non_blocking=True) for part in memory.split(broadcast.BUCKET)], device)
            found.append(max(pipe.recv() for pipe in pipes) - started)
    return found


def _raw_group(folder: str, rank: int, world: int, device: str) -> Any:
    store = torch.distributed.FileStore(str(Path(folder) / "store"), world)
    if device.startswith("cuda"):
        return torch.distributed.ProcessGroupNCCL(store, rank, world, torch.distributed.ProcessGroupNCCL.Options())
    return torch.distributed.ProcessGroupGloo(store, rank, world, broadcast.TIMEOUT)


def _broadcast(group: Any, parts: Sequence[Tensor], device: str) -> None:
    for part in parts:
        group.broadcast([part], torch.distributed.BroadcastOptions()).wait()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _take_raw(pipe: Connection, rank: int, world: int, device: str, folder: str, size: int) -> None:
    pipe.send(None)
    group, memory = _raw_group(folder, rank, world, device), torch.zeros(size, dtype=torch.uint8, device=device)
    while pipe.recv() is not None:
        _broadcast(group, memory.split(broadcast.BUCKET), device)
        pipe.send(time.perf_counter())


@contextmanager
def _processes(work: Callable[..., None], devices: Sequence[str], *given: Any) -> Iterator[list[Connection]]:
    """Within, a process on each of these devices; they are up. The message None ends them."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank, place in enumerate(devices, start=1):
        ours, theirs = context.Pipe()
        arguments = (theirs, rank, len(devices) + 1, place, *given)
        processes.append(context.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    yield pipes
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


def _receive(pipe: Connection, rank: int, world: int, device: str, prepare: Prepare | None) -> None:
    if prepare is not None:
        prepare()
    place, receiver = torch.device(device), Receiver()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    pipe.send(None)
    while (invitation := pipe.recv()) is not None:
        tensors = receiver.receive(invitation, rank, place)
        taken = {} if tensors is None else dict(tensors)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        ended = time.perf_counter()  # one clock for all processes of a host
        pipe.send((ended, digests(taken)))


def text(found: Mapping[str, Any]) -> str:
    how = f"{found['receivers']} receivers by {found['network']}"
    lines = [f"{found['gigabytes']:.3g} GB in {found['tensors']} tensors, {how}"]
    lines += [f"{'':<12}{'GB/s':>8}{'seconds':>10}{'the first':>12}{'stall':>10}"]
    for name, way in found["ways"].items():
        stall = f"{way['stall_seconds']:.4f}" if "stall_seconds" in way else "-"
        figures = f"{way['gb_per_second']:>8.2f}{way['seconds']:>10.3f}{way['first_seconds']:>12.3f}"
        lines.append(f"{name:<12}{figures}{stall:>10}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=sorted(MODELS), help="by default small on a CPU, and 410m on a GPU")
    parser.add_argument("--threads", type=int, default=1, help="of the host")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one more line, of JSON")
    options = parse(parser, model="small", rounds=1)
    torch.set_num_threads(options.threads)
    name = options.model or ("410m" if options.device.startswith("cuda") else "small")
    found = measure(options.device, MODELS[name], options.rounds, options.receivers)
    print(f"{machine.name_of(options.device)}: {text(found)}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
