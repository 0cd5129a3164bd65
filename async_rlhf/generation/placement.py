"""Where completions are sampled, and how the cores of a CPU are shared between sampling and training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from async_rlhf.config import OnlineConfig
from async_rlhf.generation.inline import InlineGenerator
from async_rlhf.generation.process import ProcessGenerator
from async_rlhf.generation.protocol import Generator, SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.reports.trace import Trace


@contextmanager
def shared_cores(config: OnlineConfig, device: torch.device) -> Iterator[int | None]:
    """Within, the learner has its share of the CPU's cores. Yields the threads for each generator process.

    What the configuration says holds; else the cores are split evenly between the learner and the workers. The learner
    on a GPU, or with nobody beside it, keeps torch's own choice.
    """
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = config.placement == "inline" or device.type != "cpu"
    workers = config.generation.workers
    per_worker = config.generation.num_threads or (None if alone else max(1, cores // (workers + 1)))
    learner = config.num_threads or (None if alone else max(1, cores - workers * (per_worker or 0)))
    if learner is not None:
        torch.set_num_threads(learner)
    try:
        yield per_worker
    finally:
        torch.set_num_threads(before)


def make_generator(
    config: OnlineConfig, policy: PreTrainedModel, params: SamplingParams, trace: Trace, threads: int | None
) -> Generator:
    """The generator that the configuration asks for."""
    autocast = torch.bfloat16 if config.bf16 else None
    if config.placement == "inline":
        return InlineGenerator(TransformersEngine(policy, params, autocast=autocast), trace)
    generation = replace(config.generation, num_threads=threads)
    return ProcessGenerator(policy, params, generation, config.staleness, trace, autocast)
