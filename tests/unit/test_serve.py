"""The words that a vLLM server is started with."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys

import pytest
import torch
from ports import free_port

import async_rlhf
from async_rlhf.commands import serve
from async_rlhf.commands.replicas import Replica
from async_rlhf.config import ConfigError, GenerationConfig, ServeConfig
from async_rlhf.config.parsing import parse
from async_rlhf.generation.vllm_middleware import OnlyWithKey
from async_rlhf.system.subprocesses import require_own_package


@pytest.fixture(autouse=True)
def _policy(tmp_path, monkeypatch):
    """A folder of this name."""
    (tmp_path / "policy").mkdir()
    monkeypatch.chdir(tmp_path)


def test_a_server_is_started_so_that_a_run_can_use_it():
    words = serve.arguments(ServeConfig("policy", port=8001, tensor_parallel_size=2), has_gpu=True)
    joined = " ".join(words)
    assert joined != " ".join(serve.arguments(ServeConfig("policy", port=8001, tensor_parallel_size=2), has_gpu=True))
    for expected in (
        "--seed ",  # another for each server
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


def test_a_server_of_the_models_own_weights_is_vllms_without_what_runs_need(monkeypatch):
    """So no weights can be loaded into it, and it has a tokenizer for chats and texts."""
    started = {}
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    monkeypatch.setattr(serve.os, "execve", lambda *given: started.update(given=given))
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    serve.run_serve(ServeConfig("policy", port=free_port(), weights="model"))
    _, words, environment = started["given"]
    ours = set(serve.arguments(ServeConfig("policy"), has_gpu=False)) - set(words)
    assert {word for word in ours if word.startswith("--")} == {
        *("--load-format", "--skip-tokenizer-init", "--generation-config", "--seed", "--logprobs-mode"),
        *("--enable-scale-out", "--worker-extension-cls"),
    }
    assert "VLLM_SERVER_DEV_MODE" not in environment
    serve.run_serve(ServeConfig("policy", port=free_port()))
    assert started["given"][2]["VLLM_SERVER_DEV_MODE"] == "1"


def test_a_cpu_has_defaults_of_its_own_and_options_win():
    config = ServeConfig("policy", options={"block_size": 64, "compilation_config": {"mode": 0}}, max_model_len=512)
    words = serve.arguments(config, has_gpu=False)
    value = dict(itertools.pairwise(words))
    assert value["--kv-cache-memory-bytes"] == str(2**30)
    assert value["--block-size"] == "64"
    assert value["--max-model-len"] == "512"
    assert value["--compilation-config"] == '{"mode": 0}'
    assert "--enforce-eager" in words
    assert "--no-enable-chunked-prefill" in words


def test_serving_becomes_the_server(monkeypatch):
    started = {}
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    monkeypatch.setattr(serve.os, "execve", lambda *given: started.update(given=given))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "0")
    serve.run_serve(ServeConfig("policy", num_threads=3))
    program, words, environment = started["given"]
    assert program == words[0] == sys.executable
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"


@pytest.fixture
def side_by_side(monkeypatch) -> list[Replica]:
    """The servers that are started side by side."""
    started: list[Replica] = []
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    monkeypatch.setattr(serve, "run_side_by_side", lambda replicas: started.extend(replicas) or 0)
    monkeypatch.setattr(serve, "available_cores", lambda: 8)
    return started


def test_a_folder_with_another_package_of_our_name_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "async_rlhf").mkdir()
    other = tmp_path / "async_rlhf" / "__init__.py"
    other.write_text("")
    with pytest.raises(ConfigError) as error:
        serve.run_serve(ServeConfig("policy"))
    with pytest.raises(ConfigError) as of_ray:
        require_own_package("ray", "Ray's workers")
    assert str(of_ray.value) == str(error.value).replace("serve:", "ray:").replace("vLLM", "Ray's workers")
    assert f"would import {other} instead of {async_rlhf.__file__}" in str(error.value)


def test_replicas_have_a_port_and_gpus_of_their_own(monkeypatch, side_by_side, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3")
    port = free_port(2)
    with pytest.raises(SystemExit):
        serve.run_serve(ServeConfig("policy", port=port, replicas=2, tensor_parallel_size=2))
    assert [replica.url for replica in side_by_side] == [f"http://127.0.0.1:{port + i}" for i in range(2)]
    assert [replica.environment["CUDA_VISIBLE_DEVICES"] for replica in side_by_side] == ["7,6", "5,4"]
    said = capsys.readouterr().err
    for i, replica in enumerate(side_by_side):
        assert f"{replica.url} will answer" in said
        value = dict(itertools.pairwise(replica.words))
        assert (value["--port"], value["--tensor-parallel-size"]) == (str(port + i), "2")
    for wrong, changes in {
        "replicas: got 3; must be at most 2: each takes 2 of the 5 GPUs": {"replicas": 3, "tensor_parallel_size": 2},
        "tensor_parallel_size: got 6; must be at most 5, the GPUs": {"tensor_parallel_size": 6},
    }.items():
        with pytest.raises(ConfigError, match=wrong):
            serve.run_serve(ServeConfig("policy", port=port, **changes))


def test_replicas_share_the_cores_of_a_cpu(monkeypatch, side_by_side):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        serve.run_serve(ServeConfig("policy", port=free_port(2), replicas=2, tensor_parallel_size=2))
    assert [replica.environment["OMP_NUM_THREADS"] for replica in side_by_side] == ["2", "2"]
    assert {replica.environment["VLLM_CPU_OMP_THREADS_BIND"] for replica in side_by_side} == {"nobind"}
    with pytest.raises(ConfigError, match="port: got 65535; must be at most 65534, so that all of the 2 replicas"):
        ServeConfig("policy", port=65535, replicas=2)


WAIT = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(1); time.sleep(600)"
SUPERVISE = f"""
import sys
from async_rlhf.commands.replicas import Replica, run_side_by_side
wait = Replica("http://a:1", [sys.executable, "-uc", {WAIT!r}], {{}})
fail = Replica("http://a:2", [sys.executable, "-c", "raise SystemExit(3)"], {{}})
sys.exit(run_side_by_side([wait, fail]))
"""


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_replicas_end_with_the_command_and_not_with_each_other(ending):
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "1\n"
    assert "http://a:2 ended (exit code 3); left: http://a:1\n" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(ending)
    # Its output ends when all that could write there have ended.
    rest = process.communicate(timeout=30)[1]
    if ending == signal.SIGTERM:
        assert "http://a:1 ended (exit code 0); left: none" in rest
        assert process.returncode == 3


KEY = "0123456789abcdef"


def test_the_key_goes_by_the_environment_and_stands_in_front_of_every_route(monkeypatch, capsys):
    started = {}
    monkeypatch.setattr(serve, "find_spec", lambda name: object())
    monkeypatch.setattr(serve.os, "execve", lambda *given: started.update(given=given))
    serve.run_serve(ServeConfig("policy", host="0.0.0.0", port=free_port(), api_key=KEY))
    _, words, environment = started["given"]
    assert environment["ASYNC_RLHF_API_KEY"] == environment["VLLM_API_KEY"] == KEY
    assert not any(KEY in word for word in words)
    assert dict(itertools.pairwise(words))["--middleware"] == "async_rlhf.generation.vllm_middleware.OnlyWithKey"
    assert "--api-key" not in words
    assert KEY not in "".join(capsys.readouterr())
    assert "--middleware" not in serve.arguments(ServeConfig("policy"), has_gpu=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu1", ""])
def test_without_a_key_a_server_is_for_its_own_host_unless_it_is_said_to_be_open(host):
    with pytest.raises(
        ConfigError, match=r"host: got .*; must be an address of this host alone, .* ASYNC_RLHF_API_KEY"
    ):
        ServeConfig("policy", host=host)
    assert ServeConfig("policy", host=host, open=True).open
    assert ServeConfig("policy", host=host, api_key=KEY).api_key == KEY
    for alone in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        ServeConfig("policy", host=alone)
    with pytest.raises(ConfigError, match="open: got True; must be false with api_key"):
        ServeConfig("policy", open=True, api_key=KEY)


@pytest.mark.parametrize("name", ["host", "api_key", "api-key", "middleware", "grpc", "grpc_port", "uds", "Root-Path"])
def test_no_option_is_a_way_past_the_key(name):
    with pytest.raises(ConfigError, match=f"options.{name}: got .*; must be left out"):
        ServeConfig("policy", api_key=KEY, options={name: "x"})


@pytest.mark.parametrize("key", ["", " x", "x\n", "ключ", "***"])
def test_a_key_can_be_sent_and_is_not_shown(key):
    for kind in (ServeConfig, lambda _, **k: GenerationConfig("vllm", "server", urls=["http://a"], **k)):
        with pytest.raises(ConfigError, match=r"api_key: got \*\*\*; must be printable ASCII"):
            kind("policy", api_key=key)


def test_the_key_is_read_from_the_environment_and_masked_where_the_configuration_is_printed(monkeypatch):
    monkeypatch.setenv("ASYNC_RLHF_API_KEY", KEY)
    config, text = parse(ServeConfig, "serve", ["--model", "policy", "--host", "0.0.0.0"])
    assert config.api_key == KEY
    assert KEY not in text
    assert "api_key: '***'" in text


def ask(path: str = "/pause", kind: str = "http", method: str = "POST", headers=()) -> int | str:
    """The status that the middleware answers with; "through" where it lets the request through."""
    told: list[object] = []

    async def behind(scope, receive, send) -> None:
        told.append("through")

    async def send(message) -> None:
        told.append(message.get("status", message.get("code")))

    scope = {"type": kind, "path": path, "method": method, "headers": list(headers)}
    asyncio.run(OnlyWithKey(behind)(scope, None, send))
    return told[0]


def test_the_middleware_lets_only_the_key_through(monkeypatch):
    monkeypatch.setenv("ASYNC_RLHF_API_KEY", KEY)
    right = (b"authorization", f"Bearer {KEY}".encode())
    assert ask(headers=[right]) == "through"
    assert ask(headers=[(b"Authorization", f"bearer {KEY}".encode())]) == "through"
    assert ask(kind="websocket", headers=[right]) == "through"
    assert ask(kind="lifespan") == "through"
    assert ask("/health", method="GET") == "through"
    for headers in (
        [],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", f"Bearer {KEY}x".encode())],
        [(b"authorization", f"Bearer {KEY[:-1]}".encode())],
        [(b"authorization", f"Basic {KEY}".encode())],
        [(b"authorization", KEY.encode())],
        [(b"authorization", "Bearer ключ".encode())],
        [(b"x-api-key", KEY.encode())],
        [right, (b"authorization", b"Bearer x")],
    ):
        assert ask(headers=headers) == 401, headers
    for path, method in (("/health", "POST"), ("/health/", "GET"), ("/healthy", "GET"), ("/v1/models", "OPTIONS")):
        assert ask(path, method=method) == 401, path
    assert ask(kind="websocket") == 1008
    monkeypatch.delenv("ASYNC_RLHF_API_KEY")
    with pytest.raises(KeyError):
        OnlyWithKey(None)


def test_serving_without_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs vLLM; .* or without a GPU, in a checkout: make setup-vllm"):
        serve.run_serve(ServeConfig("policy"))
    with pytest.raises(ConfigError, match="port: got 70000; must be below 65536"):
        ServeConfig("policy", port=70000)
