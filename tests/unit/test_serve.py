"""The words that a vLLM server is started with."""

from __future__ import annotations

import itertools
import sys

import pytest

from async_rlhf.config import ConfigError, ServeConfig
from async_rlhf.generation import vllm_serve


def test_a_server_is_started_so_that_a_run_can_use_it():
    words = vllm_serve.arguments(ServeConfig("policy", port=8001, tensor_parallel_size=2), has_gpu=True)
    joined = " ".join(words)
    for expected in (
        "--model policy",
        "--port 8001",
        "--host 127.0.0.1",
        "--dtype bfloat16",
        "--tensor-parallel-size 2",
        "--logprobs-mode processed_logprobs",
        "--worker-extension-cls async_rlhf.generation.vllm_weights.SnapshotLoader",
        "--enable-scale-out",
        "--no-enforce-eager",
        "--gpu-memory-utilization 0.9",
    ):
        assert expected in joined, expected
    assert "--kv-cache-memory-bytes" not in joined
    assert "--max-model-len" not in joined


def test_a_cpu_has_defaults_of_its_own_and_options_win():
    config = ServeConfig("policy", options={"block_size": 64, "compilation_config": {"mode": 0}}, max_model_len=512)
    words = vllm_serve.arguments(config, has_gpu=False)
    value = dict(itertools.pairwise(words))
    assert value["--kv-cache-memory-bytes"] == str(2**30)
    assert value["--block-size"] == "64"
    assert value["--max-model-len"] == "512"
    assert value["--compilation-config"] == '{"mode": 0}'
    assert "--enforce-eager" in words
    assert "--no-enable-chunked-prefill" in words


def test_serving_becomes_the_server(monkeypatch):
    started = {}
    monkeypatch.setattr(vllm_serve, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm_serve.os, "execve", lambda *given: started.update(given=given))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    vllm_serve.run_serve(ServeConfig("policy", num_threads=3))
    program, words, environment = started["given"]
    assert program == words[0] == sys.executable
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"


def test_serving_without_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vllm_serve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs vLLM; .* or on a CPU: make setup-vllm"):
        vllm_serve.run_serve(ServeConfig("policy"))
    with pytest.raises(ConfigError, match="port: got 70000; must be below 65536"):
        ServeConfig("policy", port=70000)
