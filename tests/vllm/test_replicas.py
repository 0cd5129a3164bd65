"""Several servers of one command, which share the prompts of a run."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from conftest import SHORT, new_policy, processes, run
from serving import CPU_OPTIONS, Server
from tiny import PROMPTS

pytestmark = pytest.mark.vllm


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


def test_a_run_takes_all_replicas_and_they_end_together(replicas, make_args, tokenizer):
    urls = [replicas.url, f"http://127.0.0.1:{replicas.port + 1}"]
    generation = {"placement": "server", "urls": urls, "api_key": replicas.key, "timeout": 300.0}
    metrics = run(make_args(generation={**generation, "heartbeat_timeout": 240.0}, **SHORT), tokenizer, PROMPTS)
    assert max(row["engine/logprob_difference"] for row in metrics) < 1e-4
    loaded = []
    for url in urls:
        replicas.url = url
        assert tokens_of(replicas) > 0
        loaded.append(int(replicas.request("GET", "/weight_info").json()["weight_version"].rpartition(":")[2]))
    # One that is still loading the last version while the other samples all of the last batch ends the run before it.
    assert max(loaded) == len(metrics) - 2
    assert min(loaded) >= 1
    mine = {pid for pid, (_, session, _) in processes().items() if session == replicas.process.pid}
    assert len(mine) > 2
    os.kill(replicas.process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while mine & processes().keys() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not mine & processes().keys()
