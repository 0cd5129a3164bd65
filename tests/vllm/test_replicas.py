"""Several servers of one command, which share the prompts of a run."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import SHORT, new_policy, processes, run
from serving import CPU_OPTIONS, Server
from tiny import PROMPTS

pytestmark = [pytest.mark.vllm, pytest.mark.rare]


@pytest.fixture
def replicas(tmp_path):
    """The first one; the other is at the next port."""
    config = new_policy().config
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    server = Server(tmp_path / "model", tmp_path / "log", {**CPU_OPTIONS, "replicas": 2})
    try:
        yield server
    finally:
        server.kill()


def tokens_of(server: Server) -> float:
    """That it has drawn."""
    told = server.request("GET", "/metrics").text
    return sum(map(float, re.findall(r"^vllm:generation_tokens_total{.*} (\S+)$", told, re.MULTILINE)))


def last_sampled(trace: Path) -> dict[str, int]:
    """The newest version that each server has sampled with, by the run's trace."""
    events = json.loads(trace.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, int] = {}
    for event in events:
        if event["name"] == "generate":
            name = names[event["tid"]]
            found[name] = max(found.get(name, 0), event["args"]["version"])
    return found


def test_a_run_takes_all_replicas_and_they_end_together(replicas, make_args, tokenizer):
    urls = [replicas.url, f"http://127.0.0.1:{replicas.port + 1}"]
    generation = {"placement": "server", "urls": urls, "api_key": replicas.key, "timeout": 300.0}
    args = make_args(generation={**generation, "heartbeat_timeout": 240.0}, **SHORT)
    metrics = run(args, tokenizer, PROMPTS)
    assert max(row["engine/logprob_difference"] for row in metrics) < 1e-4
    sampled = last_sampled(Path(args.output_dir) / "trace.json")
    assert max(sampled.values()) == len(metrics) - 2
    for url in urls:
        replicas.url = url
        assert tokens_of(replicas) > 0
        # One that loads while the other draws all of the last batch need not have its version.
        loaded = replicas.request("GET", "/weight_info").json()["weight_version"]
        assert int(loaded.rpartition(":")[2]) in range(sampled[f"server {url}"], len(metrics) - 1)
    mine = {pid for pid, (_, session, _) in processes().items() if session == replicas.process.pid}
    assert len(mine) > 2
    os.kill(replicas.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while mine & processes().keys() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not mine & processes().keys()
