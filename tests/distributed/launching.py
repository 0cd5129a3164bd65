"""What the tests on several ranks share: starting, ending and reading runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

NOT_OURS = ("time/", "eval_time/")
SCRIPT = Path(__file__).with_name("ranks.py")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def launch(runs: list[dict[str, Any]], ranks: int, log: Path, script: Path = SCRIPT) -> subprocess.Popen[bytes]:
    """Start the script on so many ranks, in a session of its own."""
    options = [f"--nproc-per-node={ranks}", f"--master-port={free_port()}"] if ranks > 1 else []
    return start_ranks(runs, options, log, script)


def start_ranks(
    runs: list[dict[str, Any]], options: list[str], log: Path, script: Path = SCRIPT
) -> subprocess.Popen[bytes]:
    """Start the script, by torchrun if there are options for it."""
    torchrun = ["-m", "torch.distributed.run", *options] if options else []
    words = [sys.executable, *torchrun, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [*words, json.dumps(runs)], stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def finish(process: subprocess.Popen[bytes], log: Path, timeout: float) -> str:
    """Wait for success; what was printed."""
    try:
        code = process.wait(timeout)
    finally:
        kill_all(process)
    text = log.read_text(errors="replace")
    assert code == 0, text[-6000:]
    return text


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process and all below it; torchrun gives its ranks sessions of their own."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """kill -9, parents first, so that nobody is left to report or to start anything again."""
    members = family(process)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(members, timeout=10)


def left_of(members: list[psutil.Process], seconds: float = 5.0) -> list[psutil.Process]:
    """Those that still run so much later. Orphans that have ended wait for init, which may be in no hurry."""
    deadline = time.monotonic() + seconds
    while (left := [member for member in members if runs(member)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def runs(member: psutil.Process) -> bool:
    try:
        return member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(NOT_OURS) and k != "eps"} for line in lines]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")
