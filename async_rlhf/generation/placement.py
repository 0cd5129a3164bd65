"""Where completions are sampled, and how the cores of a CPU are shared between sampling and training."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from async_rlhf import random_state
from async_rlhf.config import GenerationConfig, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.generation.agreement import Agreement
from async_rlhf.generation.inline import InlineGenerator, InlineVLLMGenerator
from async_rlhf.generation.messages import ModelSpec
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import Generator, SamplingParams
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.server import ServerGenerator
from async_rlhf.generation.shared import SharedEngine
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.lora import only_adapter, write_base
from async_rlhf.parallel import Parallel
from async_rlhf.reports.trace import Trace
from async_rlhf.weights import NoSnapshots


@contextmanager
def shared_cores(config: OnlineConfig, device: torch.device, ranks: int = 1) -> Iterator[int | None]:
    """Within, the learner has its share of the CPU's cores. Yields the threads for each generator process.

    What the configuration says holds; else the cores are split evenly between the learner's ranks on this host and the
    workers. The learner on a GPU, or with nobody beside it, keeps torch's own choice.
    """
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = config.placement == "process" and config.launch == "local"
    workers = config.generation.workers if here else 0
    alone = workers + ranks == 1 or device.type != "cpu"
    per_worker = config.generation.num_threads or (None if alone else max(1, cores // (workers + ranks)))
    learner = config.num_threads or (None if alone else max(1, (cores - workers * (per_worker or 0)) // ranks))
    if learner is not None:
        torch.set_num_threads(learner)
    try:
        yield per_worker
    finally:
        torch.set_num_threads(before)


def check_engine(config: GenerationConfig) -> None:
    """Require what the engine needs to be installed.

    Raises:
        ConfigError: it is not.
    """
    here = config.engine == "vllm" and config.placement != "server"
    right = "needs vLLM: make setup-vllm, or with a GPU pip install 'async-rlhf[vllm]'"
    require(not here or find_spec("vllm") is not None, "generation.engine", config.engine, right)


def shared_engine(
    config: OnlineConfig, policy: PreTrainedModel, params: SamplingParams, parallel: Parallel
) -> SharedEngine:
    """The engine on the learner's own policy, on every rank of it."""
    autocast = torch.bfloat16 if config.bf16 else None
    return SharedEngine(TransformersEngine(policy, params, autocast=autocast, device=parallel.device), parallel)


def make_generator(
    config: OnlineConfig,
    policy: PreTrainedModel,
    params: SamplingParams,
    trace: Trace,
    threads: int | None,
    engine: SharedEngine,
) -> Generator:
    """The generator that the configuration asks for; inline, it samples with the given engine unless that is vLLM.

    Processes and servers are rank 0's; the other ranks have what takes part where all are needed.
    """
    parallel = engine.parallel
    autocast = torch.bfloat16 if config.bf16 else None
    generation = replace(config.generation, num_threads=threads)
    max_length = config.max_prompt_length + generation.response_length
    adapters_only = config.lora.publish == "adapter"
    if config.placement == "inline":
        return _inline(generation, policy, params, trace, autocast, max_length, adapters_only, engine)
    if not parallel.ranks.leads:
        left = NoSnapshots(adapters_only)
        return RemoteGenerator(policy, params, (), left, generation, trace, autocast, parallel)
    if config.placement == "server":
        folder = Path(config.output_dir) / "weights"
        if generation.weights_dir is not None:  # perhaps one that several runs use
            folder = Path(generation.weights_dir) / f"async_rlhf-{uuid.uuid4().hex[:12]}"
        return ServerGenerator(
            policy, params, generation, config.staleness, trace, folder, max_length, autocast, parallel
        )
    return ProcessGenerator(
        policy, params, generation, config.staleness, trace, autocast, max_length, adapters_only, parallel
    )


def _inline(
    config: GenerationConfig,
    policy: PreTrainedModel,
    params: SamplingParams,
    trace: Trace,
    autocast: torch.dtype | None,
    max_length: int,
    adapters_only: bool,
    engine: SharedEngine,
) -> InlineGenerator:
    if config.engine == "transformers":
        return InlineGenerator(engine, trace, Agreement(config, params, torch.float32, autocast, engine.parallel))
    from async_rlhf.generation.vllm_engine import VLLMEngine

    dtype, device = getattr(torch, config.dtype), policy.device
    require(not device.index, "device", str(device), "must be the first GPU with vLLM inline")
    spec = ModelSpec(type(policy), policy.config, dtype, device.type, vllm=config.vllm, max_length=max_length)
    # Asleep, vLLM forgets its weights, and the ones below an adapter would not come back.
    sleep = config.vllm.sleep and device.type == "cuda" and not adapters_only
    spec = replace(spec, sleeps=sleep)
    with TemporaryDirectory() as folder:
        if adapters_only:
            write_base(policy, Path(folder), dtype)
            spec = replace(spec, base=folder, adapter=only_adapter(policy))
        before = random_state.capture()
        vllm = VLLMEngine(spec, params)  # seeds every random generator of the process
        random_state.restore(*before)
    return InlineVLLMGenerator(vllm, trace, Agreement(config, params, dtype, autocast), sleep, adapters_only)
