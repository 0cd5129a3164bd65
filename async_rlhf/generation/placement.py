"""Where completions are sampled, and how the cores of a CPU are shared between sampling and training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from async_rlhf.config import GenerationConfig, OnlineConfig
from async_rlhf.config.base import require
from async_rlhf.generation.agreement import Agreement
from async_rlhf.generation.inline import InlineVLLMGenerator
from async_rlhf.generation.messages import ModelSpec
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.models.adapters import only_adapter, write_base
from async_rlhf.ranks.parallel import ALONE
from async_rlhf.reports.trace import Trace
from async_rlhf.system import random_state


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def shared_cores(config: OnlineConfig, device: torch.device, ranks: int = 1) -> Iterator[int | None]:
    """Within, the learner uses its share of the CPU's cores. Yields the threads for each generator process.

    The configuration decides; by default the cores are split evenly between the learner's ranks on this host and the
    workers. A learner on a GPU, or without workers beside it, keeps torch's own choice.
    """
    before = torch.get_num_threads()
    per_worker, learner = _threads(config, device, ranks)
    if learner is not None:
        torch.set_num_threads(learner)
    try:
        yield per_worker
    finally:
        torch.set_num_threads(before)


def _workers(config: OnlineConfig) -> int:
    """Generator processes on this host."""
    return config.generation.workers if config.placement == "process" and config.launch == "local" else 0


def _threads(config: OnlineConfig, device: torch.device, ranks: int) -> tuple[int | None, int | None]:
    """Of each generator process, and of each rank of the learner; None for torch's choice."""
    cores, workers = available_cores(), _workers(config)
    alone = workers + ranks == 1 or device.type != "cpu"
    per_worker = config.generation.num_threads or (None if alone else max(1, cores // (workers + ranks)))
    learner = config.num_threads or (None if alone else max(1, (cores - workers * (per_worker or 0)) // ranks))
    return per_worker, learner


def threads_side_by_side(config: OnlineConfig, device: torch.device, ranks: int) -> tuple[int, int, int] | None:
    """Threads of each generator, generators, and threads of the learner, if one CPU computes both at the same time."""
    per_worker, learner = _threads(config, device, ranks)
    workers = _workers(config)
    if config.staleness == 0 or workers == 0 or ranks > 1 or per_worker is None or learner is None:
        return None
    return per_worker, workers, learner


def check_engine(config: GenerationConfig) -> None:
    """Require that what the engine needs is installed.

    Raises:
        ConfigError: it is not.
    """
    here = config.engine == "vllm" and config.placement != "server"
    right = "needs vLLM: make setup-vllm, or with a GPU pip install 'async-rlhf[vllm]'"
    require(not here or find_spec("vllm") is not None, "generation.engine", config.engine, right)


def inline_vllm(
    config: OnlineConfig, policy: PreTrainedModel, params: SamplingParams, trace: Trace
) -> InlineVLLMGenerator:
    """vLLM in this process; see :class:`~async_rlhf.generation.inline.InlineVLLMGenerator`."""
    from async_rlhf.generation.vllm_engine import VLLMEngine

    vllm, adapters_only, device = config.generation.vllm, config.lora.publish == "adapter", policy.device
    require(not device.index, "device", str(device), "must be the first GPU with vLLM inline")
    # vLLM drops its weights when it sleeps, and nothing would load those below an adapter again.
    sleep = vllm.sleep and device.type == "cuda" and not adapters_only
    spec = replace(ModelSpec.for_workers(config, policy, ALONE, device.type, None), sleeps=sleep)
    with TemporaryDirectory() as folder:
        if adapters_only:
            write_base(policy, Path(folder), spec.dtype)
            spec = replace(spec, base=folder, adapter=only_adapter(policy))
        before = random_state.capture()
        engine = VLLMEngine(spec, params)  # seeds every random generator of the process
        random_state.restore(*before)
    agreement = Agreement(config.generation, params, spec.dtype, spec.autocast)
    return InlineVLLMGenerator(engine, trace, agreement, sleep, adapters_only)
