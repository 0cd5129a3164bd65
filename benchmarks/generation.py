"""Tokens per second of the decode loop, against transformers' own `generate` and a loop that does nothing but sample.

    python benchmarks/generation.py [--model toy] [--dtype float32] [--batch 64] [--samples 4] [--rounds 7] [--json]

A model with random weights: a small GPT-NeoX ("toy"), or one of the sizes of SmolLM2-135M ("llama"). The contestants
take turns, round by round, in an order that rotates, so that a machine whose speed drifts treats them alike. Ratios are
within a round: median, lowest and highest.

    ours         TransformersEngine: also log-probabilities, random numbers by counter, versions, finish reasons
    generate     model.generate: tokens only
    bare loop    one pass over the prompts, then forward pass, softmax and a draw by turns: tokens only
    products     every product with a weight matrix that the bare loop computes, and nothing else: the least it can take
    vLLM         VLLMEngine, where vLLM is installed: also log-probabilities, seeds by request, versions, finish reasons

In the first table every row is sampled to its full length. In the second one token of `--new-tokens` ends its row, and
only tokens up to the first such token count: ours leaves out rows that have ended, the others go on with them. With
--json also the share of the time in which the device has nothing to compute, because Python is not done (`idle`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from machine import busy_seconds, seconds
from smallest import parse
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from workload import neox

from async_rlhf.config import VLLMConfig
from async_rlhf.generation.engines import ModelSpec
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.generation.vllm_engine import VLLMEngine, cpu_environment
from async_rlhf.models.weights import named_weights
from async_rlhf.types import Prompt

TEMPERATURE = 0.7
Contestant = Callable[[], int]
"""Samples the whole batch; says how many tokens it kept."""


SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}


def make_model(options: argparse.Namespace) -> PreTrainedModel:
    ends: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    if options.model == "llama":
        sizes = SMOLLM2 | ({"num_hidden_layers": 1} if options.smallest else {})
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes, **ends))
        options.vocabulary = model.config.vocab_size
    else:
        model = neox(options.vocabulary, options.hidden, options.layers, options.heads, **ends)
    return model.to(options.device, getattr(torch, options.dtype)).eval()


def make_prompts(options: argparse.Namespace) -> list[Prompt]:
    """So many that their samples fill the batch; of half the longest length and more."""
    rng, longest = random.Random(0), options.longest_prompt
    lengths = [rng.randint(longest // 2, longest) for _ in range(options.batch // options.samples)]
    return [Prompt(i, i, tuple(rng.choices(range(1, options.vocabulary), k=n))) for i, n in enumerate(lengths)]


def left_padded(prompts: list[Prompt], device: str) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both (P, T)."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    tokens_PT = torch.tensor([[0] * (longest - len(p.tokens)) + [*p.tokens] for p in prompts], device=device)
    return tokens_PT, (tokens_PT > 0).long()


def kept(tokens_BT: Tensor, stops: int) -> int:
    """How many tokens there are up to the first below ``stops`` of each row. Waits for the device."""
    stop_BT = (tokens_BT < stops).long()
    return int((stop_BT.cumsum(dim=1) - stop_BT == 0).sum())


def params_of(stops: int, options: argparse.Namespace) -> SamplingParams:
    lengths = {"response_length": options.new_tokens, "batch_size": options.batch}
    return SamplingParams(options.samples, TEMPERATURE, stop_token_ids=tuple(range(stops)), seed=0, **lengths)


def ours(model: PreTrainedModel, prompts: list[Prompt], stops: int, options: argparse.Namespace) -> Contestant:
    params = params_of(stops, options)
    engine = TransformersEngine(model, params)
    return lambda: sum(len(sample.drawn) for group in engine.generate(prompts) for sample in group)


def generate(model: PreTrainedModel, prompts: list[Prompt], stops: int, options: argparse.Namespace) -> Contestant:
    tokens_PT, mask_PT = left_padded(prompts, options.device)
    ends = {"max_new_tokens": options.new_tokens, "eos_token_id": list(range(stops)) or None}
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "num_return_sequences": options.samples}

    def sample() -> int:
        output_BT = model.generate(input_ids=tokens_PT, attention_mask=mask_PT, **sampling, **ends)
        return kept(output_BT[:, tokens_PT.shape[1] :], stops)

    return sample


def bare_loop(model: PreTrainedModel, prompts: list[Prompt], stops: int, options: argparse.Namespace) -> Contestant:
    tokens_PT, mask_PT = left_padded(prompts, options.device)

    @torch.no_grad()
    def sample() -> int:
        cache, drawn = DynamicCache(config=model.config), []
        positions = (mask_PT.cumsum(dim=1) - 1).clamp(min=0)
        output = model(tokens_PT, mask_PT, positions, past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(options.samples)
        states = (output.logits[:, -1], mask_PT, positions[:, -1:])
        logits_BV, mask_BT, positions = (x.repeat_interleave(options.samples, dim=0) for x in states)
        while True:
            sums_BV = torch.softmax(logits_BV / TEMPERATURE, dim=-1).cumsum(dim=-1)
            # A fifth of the time of torch.multinomial.
            drawn.append(torch.searchsorted(sums_BV, torch.rand_like(sums_BV[:, :1]).clamp(max=sums_BV[:, -1:])))
            if len(drawn) == options.new_tokens:
                return kept(torch.cat(drawn, dim=1), stops)
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=1)
            positions = positions + 1
            logits_BV = model(drawn[-1], mask_BT, positions, past_key_values=cache).logits[:, -1]

    return sample


def products(model: PreTrainedModel, prompts: list[Prompt], stops: int, options: argparse.Namespace) -> Contestant:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    read = left_padded(prompts, options.device)[0].numel()

    def states(rows: int, drawing: int) -> list[Tensor]:
        """What each layer gets; the head only what a token is drawn from."""
        counts = [drawing if layer is model.get_output_embeddings() else rows for layer in layers]
        sizes = zip(counts, layers, strict=True)
        return [torch.randn(n, m.in_features, dtype=model.dtype, device=options.device) for n, m in sizes]

    first, later = states(read, len(prompts)), states(options.batch, options.batch)

    @torch.no_grad()
    def compute() -> int:
        for given in [first] + [later] * (options.new_tokens - 1):
            for layer, state in zip(layers, given, strict=True):
                layer(state)
        return options.batch * options.new_tokens

    return compute


def vllm(model: PreTrainedModel, prompts: list[Prompt], stops: int, options: argparse.Namespace) -> Contestant:
    params = params_of(stops, options)
    longest = options.longest_prompt + options.new_tokens
    memory = VLLMConfig(kv_cache_gb=0.5 if options.device == "cpu" else None, gpu_memory_utilization=0.5)
    spec = ModelSpec(type(model), model.config, model.dtype, options.device, vllm=memory, max_length=longest)
    engine = VLLMEngine(spec, params)

    def sample() -> int:
        engine.load(named_weights(model), 0)  # as before every batch; what was cached of the prompts is dropped
        return sum(len(sample.drawn) for group in engine.generate(prompts) for sample in group)

    return sample


CONTESTANTS = {"ours": ours, "generate": generate, "bare loop": bare_loop, "products": products}
if find_spec("vllm") is not None:
    CONTESTANTS["vLLM"] = vllm


def run(options: argparse.Namespace, stops: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Tokens per second of every round, and the share of the last in which the device had nothing, by contestant."""
    model, prompts = make_model(options), make_prompts(options)
    taking_part = [name for name in options.contestants if not (stops and name == "products")]  # it leaves out no rows
    contestants = {name: CONTESTANTS[name](model, prompts, stops, options) for name in taking_part}
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    idle: dict[str, float] = {}
    for r in range(-1, options.rounds):  # the first round warms up
        names = list(contestants)
        for name in names[r % len(names) :] + names[: r % len(names)]:
            tokens: list[int] = []
            taken = seconds(lambda c=contestants[name], t=tokens: t.append(c()), options.device)
            if r >= 0:
                speeds[name].append(tokens[0] / taken)
                if options.json and r == options.rounds - 1 and not stops:
                    # Not profiled: the profiler makes Python slower, and the kernels not.
                    idle[name] = max(0.0, 1 - busy_seconds(contestants[name], options.device) / taken)
    return speeds, idle


def table(speeds: dict[str, list[float]]) -> str:
    """Markdown: medians over rounds, and what the ratios of a round range over."""
    lines = ["| | tokens/s | / generate | / bare loop | seconds / products' |", "|---|---|---|---|---|"]
    for name, found in speeds.items():
        cells = [name, f"{statistics.median(found):.0f}"]
        for rival in ("generate", "bare loop", "products"):
            pairs = zip(found, speeds.get(rival, [math.nan] * len(found)), strict=True)
            ratios = [b / a if rival == "products" else a / b for a, b in pairs]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"batch": 64, "samples": 4, "rounds": 7, "threads": 1, "new-tokens": 64, "longest-prompt": 64}
    for name, default in (numbers | {"vocabulary": 4096, "hidden": 256, "layers": 4, "heads": 8}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--model", choices=("toy", "llama"), default="toy", help="its shape; that of a toy is below")
    every = [*CONTESTANTS]
    parser.add_argument("--contestants", nargs="+", choices=every, default=every, help="without the others' ratios")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of all contestants' weights: float32, bfloat16")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the tables")
    sizes = {"batch": 8, "samples": 2, "rounds": 1, "new_tokens": 8, "longest_prompt": 8, "hidden": 64, "layers": 1}
    options = parse(parser, **sizes, heads=2, vocabulary=512)
    if (
        "vLLM" in options.contestants
        and options.device == "cpu"
        and "LD_PRELOAD" not in os.environ
        and cpu_environment()
    ):
        # As generator processes with vLLM are started; for all contestants alike.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **cpu_environment()})
    torch.set_num_threads(options.threads)
    if options.json:
        speeds, idle = run(options, 0)
        ends = run(options, options.vocabulary // options.new_tokens)[0] if len(speeds) > 1 else {}
        full, shorter = ({n: round(statistics.median(x)) for n, x in found.items()} for found in (speeds, ends))
        print(json.dumps({"full length": full, "ends at random": shorter, "idle": idle}))
        return
    print(f"{options.batch} completions of {options.new_tokens} tokens\n\n{table(run(options, 0)[0])}")
    print(f"\nRows end at random\n\n{table(run(options, options.vocabulary // options.new_tokens)[0])}")


if __name__ == "__main__":
    main()
