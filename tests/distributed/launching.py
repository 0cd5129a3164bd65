"""What the tests on several ranks share: starting, ending and reading runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

NOT_OURS = ("time/", "eval_time/")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def finish(process: subprocess.Popen[bytes], log: Path, timeout: float) -> str:
    """Wait for success; what was printed."""
    try:
        code = process.wait(timeout)
    finally:
        kill_all(process)
    text = log.read_text(errors="replace")
    assert code == 0, text[-6000:]
    return text


def kill_all(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(NOT_OURS) and k != "eps"} for line in lines]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")
