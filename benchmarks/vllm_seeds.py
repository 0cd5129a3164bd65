"""What seeds per request cost, and what the K completions of a prompt share, in one engine of vLLM's.

    python benchmarks/vllm_seeds.py [--batch 64] [--samples 4] [--rounds 9] [--threads 1] [--device cpu]

A GPT-NeoX with random weights, full-length completions. Rounds with and without seeds take turns in one process, and
which comes first alternates, so that a machine whose speed drifts treats them alike; ratios are within a round. Before
each of them the weights are loaded again, as before every batch of a run, which drops what was cached. Then it says how
many tokens of prompts vLLM did not compute, because another completion of the same prompt had.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from generation import TEMPERATURE, make_model, make_prompts
from smallest import parse
from transformers import GPTNeoXForCausalLM

from async_rlhf.config import VLLMConfig
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.vllm_engine import VLLMEngine, cpu_environment
from async_rlhf.models.weights import named_weights
from async_rlhf.types import Prompt


def start(model: GPTNeoXForCausalLM, options: argparse.Namespace) -> VLLMEngine:
    params = SamplingParams(options.samples, TEMPERATURE, options.new_tokens, (), 0, batch_size=options.batch)
    memory = VLLMConfig(
        kv_cache_gb=0.5 if options.device == "cpu" else None,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=not options.no_caching,
    )
    longest = options.longest_prompt + options.new_tokens
    spec = ModelSpec(type(model), model.config, model.dtype, options.device, vllm=memory, max_length=longest)
    return VLLMEngine(spec, params)


def follow() -> list[tuple[int, int]]:
    """Of each completion that begins: the tokens of its prompt, and how many of them were there already."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    look_up, found = KVCacheManager.get_computed_blocks, []

    def look_up_and_note(manager: Any, request: Any) -> Any:
        result = look_up(manager, request)
        found.append((request.num_prompt_tokens, result[1]))
        return result

    KVCacheManager.get_computed_blocks = look_up_and_note
    return found


def seconds(engine: VLLMEngine, model: GPTNeoXForCausalLM, prompts: list[Prompt], seeded: bool) -> float:
    """Of one batch, without loading; on a CPU those of the processor, which others may use as well."""
    clock = time.process_time if next(model.parameters()).device.type == "cpu" else time.perf_counter
    engine.params = replace(engine.params, seed_per_request=seeded)
    engine.load(named_weights(model), engine.version + 1)
    started = clock()
    engine.generate(prompts)
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"batch": 64, "samples": 4, "rounds": 9, "threads": 1, "new-tokens": 64, "longest-prompt": 64}
    for name, default in (numbers | {"vocabulary": 4096, "hidden": 256, "layers": 4, "heads": 8}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-caching", action="store_true", help="share nothing")
    sizes = {"batch": 8, "samples": 2, "rounds": 1, "new_tokens": 8, "hidden": 64, "layers": 1, "heads": 2}
    options = parse(parser, **sizes, vocabulary=512)
    if options.device == "cpu" and "LD_PRELOAD" not in os.environ and cpu_environment():
        # As generator processes with vLLM are started.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **cpu_environment()})
    torch.set_num_threads(options.threads)
    model, prompts = make_model(options), make_prompts(options)
    engine, begun = start(model, options), follow()
    found: dict[bool, list[float]] = {True: [], False: []}
    for r in range(-1, options.rounds):  # the first round warms up
        for seeded in (True, False) if r % 2 else (False, True):
            taken = seconds(engine, model, prompts, seeded)
            if r >= 0:
                found[seeded].append(taken)
    ratios = [a / b for a, b in zip(found[True], found[False], strict=True)]
    rows = options.batch * options.new_tokens
    for seeded, name in ((True, "a seed per request"), (False, "one generator")):
        print(f"{name}: {rows / statistics.median(found[seeded]):.0f} tokens/s")
    print(f"seconds with / without: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
    tokens, shared = sum(tokens for tokens, _ in begun), sum(hits for _, hits in begun)
    print(f"tokens of prompts: {tokens}, of them shared: {shared} ({shared / tokens:.1%})")
    engine.close()


if __name__ == "__main__":
    main()
