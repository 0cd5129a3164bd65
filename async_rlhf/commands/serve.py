"""Start a vLLM server that can receive weights from a run, or that serves a model to programs that evaluate it."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NoReturn

import torch

from async_rlhf.commands.replicas import Replica, run_side_by_side
from async_rlhf.config import ConfigError, ServeConfig
from async_rlhf.config.base import require
from async_rlhf.config.secrets import API_KEY_VARIABLE
from async_rlhf.generation import vllm_engine
from async_rlhf.generation.placement import available_cores
from async_rlhf.generation.vllm_requests import own_seed
from async_rlhf.system.names import check_source, with_revision
from async_rlhf.system.subprocesses import require_own_package


def run_serve(config: ServeConfig) -> NoReturn:
    """Replace this process by the server, so that signals and exit code are the server's; or run several beside it."""
    require_own_package("serve", "vLLM")  # python -m puts the current folder first, too
    check_source(config.model, "model")
    if find_spec("vllm") is None:
        raise ConfigError(
            "serve: needs vLLM; pip install 'async-rlhf[vllm]', or without a GPU, in a checkout: make setup-vllm"
        )
    has_gpu = torch.cuda.is_available()
    _check_gpus(config, torch.cuda.device_count() if has_gpu else None)
    replicas = [_replica(config, number, has_gpu) for number in range(config.replicas)]
    for number in range(config.replicas):
        _require_free(config.host, config.port + number)
    if config.open:
        what = "load weights and call methods" if config.weights == "run" else "ask the model"
        print(f"async-rlhf serve: open: whoever reaches the port can {what}", file=sys.stderr)
    for replica in replicas:
        print(f"async-rlhf serve: {replica.url} will answer in a minute or so", file=sys.stderr)
    if len(replicas) > 1:
        sys.exit(run_side_by_side(replicas))
    os.execve(sys.executable, list(replicas[0].words), dict(replicas[0].environment))


def _check_gpus(config: ServeConfig, gpus: int | None) -> None:
    """Require enough of them."""
    each, needed = config.tensor_parallel_size, config.tensor_parallel_size * config.replicas
    if gpus is None or needed <= gpus:
        return
    if each > gpus:
        require(False, "tensor_parallel_size", each, f"must be at most {gpus}, the GPUs that this process sees")
    rule = f"must be at most {gpus // each}: each takes {each} of the {gpus} GPUs that this process sees"
    require(False, "replicas", config.replicas, rule)


def _require_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            why = f"{host} cannot be listened on there ({error.strerror})"
            raise ConfigError(f"port: got {port}; must be a free one: {why}") from error


def _replica(config: ServeConfig, number: int, has_gpu: bool) -> Replica:
    """One of the servers: its port, and its share of the GPUs or of the CPU's threads."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    if config.weights == "run":
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # needed to load weights into a server
    if config.api_key is not None:  # not on the command line, which every user of the host can read
        environment |= {API_KEY_VARIABLE: config.api_key, "VLLM_API_KEY": config.api_key}
    gpus, threads = config.tensor_parallel_size, config.num_threads
    if not has_gpu:
        environment |= vllm_engine.cpu_environment()
        if threads is None and config.replicas * gpus > 1:
            threads = max(1, available_cores() // config.replicas)
    elif config.replicas > 1:
        environment |= vllm_engine.gpu_environment([f"cuda:{gpu}" for gpu in range(number * gpus, (number + 1) * gpus)])
    if threads is not None:
        environment |= vllm_engine.threads_of_each(1 if has_gpu else gpus, threads)
    port = config.port + number
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += arguments(replace(config, port=port), has_gpu)
    return Replica(f"http://{config.host}:{port}", words, environment)


def _for_a_run() -> dict[str, Any]:
    """What makes vLLM's server one that runs sample with."""
    return {
        "load_format": "dummy",  # the run loads its own weights before anything is sampled
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "generation_config": "vllm",
        "seed": own_seed(),  # for runs whose requests have none
        "logprobs_mode": "processed_logprobs",  # of the temperature-scaled distribution
        "enable_scale_out": True,  # the endpoint for tokens
        "worker_extension_cls": "async_rlhf.generation.vllm_weights.SnapshotLoader",
    }


def arguments(config: ServeConfig, has_gpu: bool) -> list[str]:
    """Arguments of vLLM's own server."""
    kv_cache_gb = config.kv_cache_gb
    if kv_cache_gb is None and not has_gpu:
        kv_cache_gb = vllm_engine.CPU_KV_CACHE_GB
    model, revision = with_revision(config.model)
    options = {
        "model": model,
        "revision": revision,
        "host": config.host,
        "port": config.port,
        "dtype": config.dtype,
        **(_for_a_run() if config.weights == "run" else {}),
        "trust_remote_code": config.trust_remote_code,
        "middleware": None if config.api_key is None else "async_rlhf.generation.vllm_middleware.OnlyWithKey",
        "uvicorn_log_level": "warning",
        "max_model_len": config.max_model_len,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
        "enforce_eager": not has_gpu if config.enforce_eager is None else config.enforce_eager,
        **({} if has_gpu else vllm_engine.CPU_OPTIONS),
        **config.options,
    }
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words
