"""What the tests on several ranks share: starting, ending and reading runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from forked import Forked, be_script, start_forked
from ports import free_port
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

NOT_OURS = ("time/", "eval_time/")
SCRIPT = Path(__file__).with_name("ranks.py")


def chosen(request: pytest.FixtureRequest) -> set[tuple[object, ...]]:
    """The cases and strategies whose tests are to run."""
    return {tuple(item.callspec.params.values()) for item in request.session.items if hasattr(item, "callspec")}


def launch(runs: list[Any], ranks: int, log: Path, script: Path = SCRIPT) -> Forked:
    """Start the script on so many ranks, in a session of its own."""
    options = [f"--nproc-per-node={ranks}", f"--master-port={free_port()}"] if ranks > 1 else []
    return start_ranks(runs, options, log, script)


def start_ranks(runs: list[Any], options: list[str], log: Path, script: Path = SCRIPT) -> Forked:
    """Start the script, by torchrun's agent if there are options for it; the agent and its ranks are forks.

    How torchrun itself starts ranks is in test_launch_ranks.py.
    """
    target = partial(_be_agent, options) if options else be_script
    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return start_forked(target, script, json.dumps(runs), log=log, **variables)


def _be_agent(options: list[str], script: Path, words: str) -> None:
    """What ``python -m torch.distributed.run`` does."""
    config, _, _ = config_from_args(parse_args([*options, str(script)]))
    config.start_method, api._wrap = "fork", _be_rank
    elastic_launch(config, be_script)(script, words)


def _be_rank(rank: int, run: Callable[..., None], words: Any, environments: Any, out: Any, errors: Any, ends: Any, *_):
    """In place of torch's own, which waits for the agent before it ends: no program does."""
    os.environ.update(environments[rank])
    print(f"rank {os.environ['RANK']} is process {os.getpid()}", flush=True)
    run(*words[rank])
    ends[rank].put(None)


def process_of(rank: int, log: Path) -> psutil.Process:
    """The process of a rank, which is in the log."""
    return psutil.Process(int(re.search(rf"rank {rank} is process (\d+)", log.read_text(errors="replace"))[1]))


def finish(process: subprocess.Popen[bytes] | Forked, log: Path, timeout: float) -> str:
    """Wait for success; what was printed."""
    try:
        code = process.wait(timeout)
    finally:
        kill_all(process)
    text = log.read_text(errors="replace")
    assert code == 0, text[-6000:]
    return text


def family(process: subprocess.Popen[bytes] | Forked) -> list[psutil.Process]:
    """The process and all below it; torchrun gives its ranks sessions of their own."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_all(process: subprocess.Popen[bytes] | Forked) -> None:
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
