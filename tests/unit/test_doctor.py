"""What the doctor says of machines that nobody here has: nvidia-smi's answers are made up."""

from __future__ import annotations

import shutil
import sysconfig
from types import SimpleNamespace

import pytest
import torch

from async_rlhf.commands.doctor import DoctorConfig, run_doctor

H100 = "0, NVIDIA H100 80GB HBM3, 9.0, 580.65.06, 81559, 81000, Default"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Gives what the doctor says of a machine, by name of the finding: (value, problem)."""

    def look(*lines: str, seen: int = 1, cuda: str | None = "13.0", peers: bool = True, fails: bool = False):
        smi = tmp_path / "nvidia-smi"
        smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {int(fails)}\n")
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: peers)
        found = run_doctor(DoctorConfig())["findings"]
        return {one["name"]: (one["value"], one["problem"]) for one in found}

    return look


def test_a_good_machine_has_no_problem(machine, capsys):
    found = machine(H100)
    assert found["driver"] == ("580.65.06, torch for CUDA 13.0, which sees 1 GPUs", "")
    assert found["GPU 0"] == ("NVIDIA H100 80GB HBM3, compute capability 9.0, 79.1 of 79.6 GiB free", "")
    assert "P2P" not in found
    shared = machine("0, NVIDIA GB10, 12.1, 580.65.06, [N/A], [N/A], [N/A]")
    assert shared["GPU 0"] == ("NVIDIA GB10, compute capability 12.1, memory not known", "")
    assert "ok  GPU 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "options", "name", "problem"),
    [
        (H100.replace("580.65", "550.54"), {}, "driver", "torch is built for CUDA 13.0, which needs driver 580"),
        (H100, {"cuda": None, "seen": 0}, "driver", "this build of torch is for CPUs"),
        (H100, {"seen": 0}, "driver", "torch sees no GPU: is CUDA_VISIBLE_DEVICES empty"),
        (H100.replace("9.0", "7.5"), {}, "GPU 0", "it has no bfloat16 and no kernel for packed rows"),
        (H100.replace("9.0", "7.0"), {}, "GPU 0", "torch for CUDA 13.0 has no kernels for it"),
        (H100.replace("Default", "Exclusive_Process"), {}, "GPU 0", "generator and learner cannot share it"),
        (H100.replace("81000", "40000"), {}, "GPU 0", "others use its memory"),
        (H100, {"seen": 2, "peers": False}, "P2P", "weights and gradients go by the host"),
        ("Failed to initialize NVML: Driver/library version mismatch", {"fails": True}, "GPUs", "Failed to initialize"),
    ],
)
def test_what_will_not_work_is_said(machine, capsys, line, options, name, problem):
    found = machine(line, **options)
    assert problem in found[name][1]
    assert problem in capsys.readouterr().out


def test_a_missing_compiler_or_header_is_said(machine, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine(H100)["compiler"] == (
        "none",
        "vLLM on a GPU and torch_compile need a C compiler when they start: install gcc",
    )
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    assert "need /nowhere/Python.h: install python3" in machine(H100)["compiler"][1]


def test_blackwell_without_flashinfers_kernels_is_said(machine, tmp_path, monkeypatch):
    """Where vLLM is: they can be installed, or nvcc and ninja compile them."""
    b200, cuda = H100.replace("H100 80GB HBM3, 9.0", "B200, 10.0"), tmp_path / "cuda" / "bin"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(cuda.parent))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    assert "FlashInfer, is off without kernels: vllm download-kernels" in machine(b200)["GPU 0"][1]
    assert machine(H100)["GPU 0"][1] == ""
    cuda.mkdir(parents=True)
    for program in (cuda / "nvcc", tmp_path / "ninja"):
        assert "FlashInfer" in machine(b200)["GPU 0"][1]
        program.touch(mode=0o755)
    assert machine(b200)["GPU 0"][1] == ""
    (cuda / "nvcc").unlink()
    assert "FlashInfer" in machine(b200)["GPU 0"][1]
    (tmp_path / "flashinfer_cubin").mkdir()
    assert machine(b200)["GPU 0"][1] == ""


def test_full_disks_and_small_shared_memory_are_said(machine, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(total=6e7, free=6e7))
    found = machine(H100)
    assert "checkpoint 96 GB" in found["disk for runs"][1]
    assert "docker run --ipc=host" in found["shared memory"][1]
