"""What it saves to compute once what rows have in common at their beginning: packed rows against the forest of them.

    python benchmarks/shared_tokens.py [--json] [--rounds 5] [--shapes tldr4 sums] [--models neox llama]
    python benchmarks/shared_tokens.py --device cuda:0 --bf16

Forward and backward pass of the log-probabilities of the answers, by the learner's own functions, on one thread of a
CPU. K answers of random tokens follow a prompt; their lengths are 0.5 to 1.5 times what the shape says. All ways take
turns within a round. `neox` is a GPT-NeoX of 6 layers, width 256 and 4,096 words; `llama` has SmolLM2-135M's shape, 6
of its 30 layers, and its 49,152 words, whose head looks at each answer's tokens either way.

A GPU would spend its time on launches of kernels for so little. There both have 410 million parameters, in 24 layers of
width 1,024, and a shape has as many prompts as make 16,384 tokens of answers with their prompts; fewer below 48 GB.

    tokens    of the rows, and of their forest
    fewer     rows / forest: what would be saved if a token cost the same wherever it stands, and all else nothing
    bound     multiplications, rows / forest: those of blocks, of the head, which is shared only where answers are, and
              of attention, as answers attend to the prompt either way
    padded    time of padded rows / of packed ones: the median over rounds
    ratio     processor time of packed rows / of the forest: the median over rounds, the smallest and the largest;
              on a GPU wall time, as of all here
    part      ratio / bound
    memory    bytes kept for the backward pass, packed rows / forest

Then, on a CPU, answers of that many tokens are sampled by the engine on transformers. Prompts have up to two tokens
less, as all are seldom equally long, and rows that are padded need a mask:

    seconds   of the processor with a prompt's keys and values repeated for its K rows, and shared by them; the median
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from machine import seconds
from smallest import parse
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from workload import neox

from async_rlhf.generation import decode_cache
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.models.forward import response_logprobs
from async_rlhf.models.packing import choose
from async_rlhf.types import Prompt

SHAPES = {
    "docstrings2": (17, 19, 2, 64),
    "docstrings4": (17, 19, 4, 32),
    "sums": (45, 7, 8, 8),
    "tldr2": (512, 53, 2, 4),
    "tldr4": (512, 53, 4, 2),
    "reasoning": (256, 512, 8, 1),
    "agents": (1024, 256, 8, 1),
    "tiny": (8, 4, 2, 2),
}
"""Tokens of a prompt and of an answer, K, and prompts."""
WORDS = 4000
BYTES_A_TOKEN = 3_000_000
"""Of a GPU's memory: 0.7 MB are kept for the backward pass, of up to 1.7 times as many where rows are padded."""
PAIRS = ("padded", "packed"), ("packed", "forest")


@lru_cache(maxsize=1)
def model_of(kind: str, size: str, device: str = "cpu") -> PreTrainedModel:
    large = size == "410m"
    if kind == "neox":
        return (neox(50304, 1024, 24, 16, 4096) if large else neox(4096, 256, 6, 4, 4096)).to(device)
    torch.manual_seed(0)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = dict(zip(names, (1024, 24, 16, 4, 4096) if large else (576, 6, 9, 3, 1536), strict=True))
    more = {"tie_word_embeddings": True, "max_position_embeddings": 4096}
    return LlamaForCausalLM(LlamaConfig(vocab_size=49152, **sizes, **more)).to(device)


def shape_of(name: str, size: str, device: str) -> tuple[int, int, int, int]:
    prompt, answer, samples, prompts = SHAPES[name]
    if size == "410m" and device != "cpu":
        tokens = min(16384, torch.cuda.get_device_properties(device).total_memory // BYTES_A_TOKEN)
        prompts = max(1, tokens // (samples * (prompt + answer)))
    return prompt, answer, samples, prompts


def rows_of(prompt: int, answer: int, samples: int, prompts: int) -> tuple[Tensor, Tensor]:
    """Tokens and mask of the answers."""
    random = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, WORDS, (prompts * samples, prompt + 2 * answer), generator=random)
    tokens_BT[:, :prompt] = tokens_BT[::samples, :prompt].repeat_interleave(samples, dim=0)
    lengths_B = (answer * (0.5 + torch.rand(len(tokens_BT), generator=random))).long().clamp(min=1) + prompt
    places_T = torch.arange(tokens_BT.shape[1])
    return tokens_BT, ((places_T >= prompt) & (places_T < lengths_B[:, None])).float()


def step(model: PreTrainedModel, tokens_BT: Tensor, mask_BT: Tensor) -> None:
    """Forward and backward pass."""
    model.zero_grad()
    found = response_logprobs(model, tokens_BT, mask_BT, 1.0, with_entropies=False, device=model.device)
    found.logprobs_BT.sum().backward()


def counted(model: PreTrainedModel, compute: Callable[[], Any]) -> tuple[int, float, int]:
    """Tokens, multiplications of a forward pass, and bytes kept for the backward pass."""
    tokens, work, kept = list[int](), list[float](), dict[int, int]()
    head, layers, width = model.get_output_embeddings(), model.base_model.layers, model.config.hidden_size

    def count(_model: Any, _args: Any, given: dict[str, Any]) -> None:
        tokens.append(given["input_ids"].numel())
        work.extend(float(tokens[0] * p.numel()) for layer in layers for p in layer.parameters())
        pairs = sum(b.length * (b.position + (b.length + 1) / 2) for b in given["forest"].branches)
        work.append(2 * width * pairs * len(layers))

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    handles = [
        model.register_forward_pre_hook(count, with_kwargs=True),
        head.register_forward_pre_hook(lambda _m, given: work.append(float(len(given[0]) * head.weight.numel()))),
    ]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    for handle in handles:
        handle.remove()
    return tokens[0], sum(work), sum(kept.values())


def measure(kind: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    model = model_of(kind, options.size, options.device)
    rows = rows_of(*shape_of(shape, options.size, options.device))
    compute = partial(step, model, *rows)
    taken: dict[str, list[float]] = {"padded": [], "packed": [], "forest": []}
    counts = {}
    for turn in range(options.rounds + 1):
        for way, so_far in taken.items():
            with torch.autocast(torch.device(options.device).type, torch.bfloat16, enabled=options.bf16):
                choose(way != "padded", False, {"model": model}, options.bf16, sharing=way == "forest")
                if turn:
                    so_far.append(seconds(compute, options.device, of_processor=True))
                elif way == "padded":
                    compute()
                else:
                    counts[way] = counted(model, compute)
    padded, ratios = ([a / b for a, b in zip(taken[one], taken[other], strict=True)] for one, other in PAIRS)
    fewer, bound, memory = (packed / forest for packed, forest in zip(*counts.values(), strict=True))
    ratio = statistics.median(ratios)
    found = {"model": kind, "shape": shape, "tokens": counts["packed"][0], "forest": counts["forest"][0]}
    found |= {"fewer": fewer, "bound": bound, "padded": statistics.median(padded), "ratio": ratio}
    return found | {"smallest": min(ratios), "largest": max(ratios), "part": ratio / bound, "memory": memory}


def sample(kind: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of sampling, with keys and values repeated and shared."""
    prompt, answer, samples, prompts = SHAPES[shape]
    tokens_BT, _ = rows_of(*SHAPES[shape])
    given = [Prompt(n, n, tuple(row[n % 3 : prompt])) for n, row in enumerate(tokens_BT[::samples].tolist())]
    # No token ends an answer.
    params = SamplingParams(samples, 1.0, answer, (-1,), 0, batch_size=samples * prompts)
    engine, taken = TransformersEngine(model_of(kind, options.size).eval(), params), dict[bool, list[float]]()
    for turn in range(options.rounds + 1):
        for shared in (False, True):
            decode_cache.SHARED = 1 if shared else 10**9
            spent = seconds(lambda: engine.generate(given), "cpu", of_processor=True)
            if turn:
                taken.setdefault(shared, []).append(spent)
    ratios = [repeated / once for repeated, once in zip(*taken.values(), strict=True)]
    repeated, once = map(statistics.median, taken.values())
    found = {"repeated": repeated, "shared": once, "ratio": statistics.median(ratios)}
    return {"model": kind, "shape": shape, **found, "smallest": min(ratios), "largest": max(ratios)}


def table(name: str, columns: list[str], options: argparse.Namespace, measured: Callable[..., Any]) -> list[Any]:
    """Print a row for each model and shape."""
    print(f"{name:<20}" + "".join(f"{column:>10}" for column in columns))
    rows = []
    for kind in options.models:
        for shape in options.shapes:
            rows.append(row := measured(kind, shape, options))
            numbers = (row[column] if isinstance(row[column], int) else f"{row[column]:.2f}" for column in columns)
            print(f"{kind:<7}{shape:<13}" + "".join(f"{number:>10}" for number in numbers), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as one line of JSON, last")
    parser.add_argument("--rounds", type=int, default=5)
    given = [shape for shape in SHAPES if shape != "tiny"]
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=given)
    parser.add_argument("--models", nargs="+", choices=("neox", "llama"), default=["neox", "llama"])
    parser.add_argument("--size", choices=("small", "410m"), help="by default small on a CPU, and 410m on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    options = parse(parser, rounds=1, size="small", shapes=["tiny"], models=["neox"])
    options.size = options.size or ("small" if options.device == "cpu" else "410m")
    torch.set_num_threads(1)
    columns = ["tokens", "forest", "fewer", "bound", "padded", "ratio", "smallest", "largest", "part", "memory"]
    rows = table("training", columns, options, measure)
    sampled = []
    if options.device == "cpu":
        sampled = table("sampling", ["repeated", "shared", "ratio", "smallest", "largest"], options, sample)
    if options.json:
        print(json.dumps({"rows": rows, "sampling": sampled}))


if __name__ == "__main__":
    main()
