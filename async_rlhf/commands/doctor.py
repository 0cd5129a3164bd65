"""Says what this machine has for a run: driver, GPUs, compilers, disk and memory; what will not work, and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from async_rlhf.config.base import Checked, configuration
from async_rlhf.system.versions import environment

_GB = 1e9
_SECONDS = 60
_QUERY = ("index", "name", "compute_cap", "driver_version", "memory.total", "memory.free", "compute_mode")
_DRIVERS = {"13": 580, "12": 525}
"""The least driver for each major version of CUDA (NVIDIA, "CUDA Compatibility")."""
_LEAST_DISK_GB, _LEAST_MEMORY_GB, _LEAST_SHARED_GB = 20, 8, 1


@configuration
class DoctorConfig(Checked):
    """Say what this machine has for a run, what will not work on it, and why."""


class Finding(NamedTuple):
    """Something that this machine has."""

    name: str
    value: str
    problem: str = ""
    """What will not work, and what to do; "" if it is as it should be."""


def run_doctor(_config: DoctorConfig) -> dict[str, Any]:
    """Print the findings. Returns {"findings": [{"name", "value", "problem"}], "problems": how many have one}."""
    findings = [*_software(), *_gpus(), *_host()]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{'!!' if finding.problem else 'ok'}  {finding.name:<{width}}  {finding.value}")
        if finding.problem:
            print(f"    {'':<{width}}  {finding.problem}")
    problems = sum(bool(finding.problem) for finding in findings)
    print(f"{problems} of {len(findings)} need your attention" if problems else "all is as it should be")
    return {"findings": [finding._asdict() for finding in findings], "problems": problems}


def _software() -> Iterator[Finding]:
    known = environment()
    packages = ", ".join(f"{name} {version}" for name, version in known["packages"].items())
    yield Finding("code", f"async_rlhf {known['async_rlhf']['version']}, Python {known['python']}, {known['system']}")
    yield Finding("packages", packages)
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    problem = ""
    if compiler is None:
        problem = "vLLM on a GPU and torch_compile need a C compiler when they start: install gcc"
    elif not header.is_file():
        version = sysconfig.get_python_version()
        problem = f"vLLM on a GPU and torch_compile need {header}: install python{version}-dev"
    yield Finding("compiler", compiler or "none", problem)


def _gpus() -> Iterator[Finding]:
    """What the driver says of GPUs, and what torch does."""
    import torch

    rows, why = _nvidia_smi()
    built, count = torch.version.cuda, torch.cuda.device_count()
    if not rows:
        problem = f"nvidia-smi fails: {why}" if why else ""
        yield Finding("GPUs", f"{count or 'none'}: {'seen' if count else 'runs train and sample on the CPU'}", problem)
        return
    driver = int(rows[0]["driver_version"].partition(".")[0])
    problem = ""
    if built is None:
        problem = "this build of torch is for CPUs: install one for CUDA, see https://pytorch.org/get-started"
    elif driver < (least := _DRIVERS.get(built.partition(".")[0], 0)):
        problem = f"torch is built for CUDA {built}, which needs driver {least} or newer"
    elif count == 0:
        problem = "torch sees no GPU: is CUDA_VISIBLE_DEVICES empty, or a MIG slice not named by it?"
    yield Finding("driver", f"{rows[0]['driver_version']}, torch for CUDA {built}, which sees {count} GPUs", problem)
    for row in rows:
        yield _gpu(row, built)
    pairs = [pair for pair in combinations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)]
    if count > 1:
        problem = "weights and gradients go by the host; if NCCL hangs, set NCCL_P2P_DISABLE=1" if pairs else ""
        yield Finding("P2P", f"{len(pairs)} pairs of GPUs without" if pairs else "between all GPUs", problem)


def _nvidia_smi() -> tuple[list[dict[str, str]], str]:
    """What it says of each GPU, by the names in :data:`_QUERY`, and why it fails; nothing of both without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except FileNotFoundError:
        return [], ""
    except (OSError, subprocess.SubprocessError) as error:
        return [], str(error)
    if done.returncode:
        return [], " ".join((done.stdout + done.stderr).split())
    lines = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(_QUERY, line, strict=True)) for line in lines if len(line) == len(_QUERY)], ""


def _gpu(row: dict[str, str], built: str | None) -> Finding:
    problems = []
    capability = tuple(map(int, row["compute_cap"].split("."))) if "." in row["compute_cap"] else (0, 0)
    if capability < (7, 5):
        problems.append(f"torch for CUDA {built} has no kernels for it: it takes Turing or newer")
    elif capability < (8, 0):
        problems.append("it has no bfloat16 and no kernel for packed rows: set fp16, generation.dtype: float16")
    if capability[0] == 10 and _lacks_flashinfer():
        problems.append("vLLM's fastest attention for it, FlashInfer, is off without kernels: vllm download-kernels")
    if row["compute_mode"] not in ("Default", "[N/A]"):
        mode = row["compute_mode"]
        problems.append(f"compute mode {mode}: generator and learner cannot share it; nvidia-smi -c DEFAULT")
    memory = "memory not known"
    with suppress(ValueError):  # "[N/A]" where CPU and GPU share it
        free, total = (float(row[name]) / 1024 for name in ("memory.free", "memory.total"))
        memory = f"{free:.1f} of {total:.1f} GiB free"
        if free < 0.9 * total:
            problems.append("others use its memory: vLLM would not find its share free")
    value = f"{row['name']}, compute capability {row['compute_cap']}, {memory}"
    return Finding(f"GPU {row['index']}", value, "; ".join(problems))


def _lacks_flashinfer() -> bool:
    """Whether vLLM is here, but neither FlashInfer's kernels nor nvcc and ninja, which compile them."""
    if find_spec("vllm") is None or find_spec("flashinfer_cubin") is not None:
        return False
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return not (any(map(shutil.which, places)) and shutil.which("ninja"))


def _host() -> Iterator[Finding]:
    """Memory and disk."""
    sizes = {line.split(":")[0]: line.split()[1] for line in _lines(Path("/proc/meminfo"))}
    if "MemAvailable" in sizes:
        free, total = (int(sizes[name]) * 1024 / _GB for name in ("MemAvailable", "MemTotal"))
        problem = "a run holds two versions of the weights here" if free < _LEAST_MEMORY_GB else ""
        yield Finding("memory", f"{free:.0f} of {total:.0f} GB free, {os.cpu_count()} cores", problem)
    caches = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    temporary = Path(tempfile.gettempdir())
    for name, path in (("disk for runs", Path.cwd()), ("disk for models", caches), ("disk for other files", temporary)):
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        free = shutil.disk_usage(there).free / _GB
        problem = "an 8B model is 16 GB, its checkpoint 96 GB" if free < _LEAST_DISK_GB else ""
        yield Finding(name, f"{free:.0f} GB free at {path}", problem)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / _GB
        small = size < _LEAST_SHARED_GB
        problem = "NCCL and vLLM on several GPUs need more: docker run --ipc=host" if small else ""
        yield Finding("shared memory", f"{size:.1f} GB at {shared}", problem)
    if find_spec("vllm") is None:
        yield Finding("vLLM", "not installed: models sample by transformers, which is slower (make setup-vllm)")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []
