"""How long the learner's process takes from an engine's reply to padded tensors, beside copying the same bytes.

    python benchmarks/samples.py        # 1,000 samples of 1,000 tokens

The reply is as vLLM gives it, lists of Python's numbers, or as a worker of transformers' engine sends it. Cost grows
with the number of tokens.
"""

from __future__ import annotations

import argparse
import pickle
import random
import time
from collections.abc import Callable

import torch
from smallest import parse

from async_rlhf.generation.protocol import SamplingParams, check_completions
from async_rlhf.models.rows import sampled_rows
from async_rlhf.types import Prompt, Sample, drawn_versions

VOCABULARY = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parse(parser, rows=10, tokens=20, repeats=1)
    torch.set_num_threads(1)
    rng, length = random.Random(0), options.tokens
    prompt = Prompt(0, 0, tuple(rng.randrange(VOCABULARY) for _ in range(100)))
    tokens = [rng.randrange(1, VOCABULARY) for _ in range(length)]
    logprobs = [-rng.random() for _ in range(length)]

    def build() -> list[tuple[Sample, ...]]:
        return [(Sample.answer(prompt.tokens, tokens, logprobs, [3] * length, "length"),) for _ in range(options.rows)]

    sent, params = pickle.dumps(build()), SamplingParams(1, 1.0, length, (0,), 0)

    def receive(completions: list[tuple[Sample, ...]]) -> None:
        samples = [sample for group in completions for sample in group]
        check_completions("it answered", [prompt] * options.rows, completions, params, VOCABULARY)
        drawn_versions(samples)
        sampled_rows(samples)

    bare = sampled_rows([sample for group in build() for sample in group])
    copied = _fastest(lambda: [x.clone() for x in bare.values()], options.repeats)
    print(f"copying the tensors: {copied:.3f} s")
    for what, work in (
        ("from a worker's message", lambda: receive(pickle.loads(sent))),
        ("from lists of numbers", lambda: receive(build())),
    ):
        seconds = _fastest(work, options.repeats)
        print(f"{what}, checked, to tensors: {seconds:.3f} s, {seconds / copied:.0f} times the copy")


def _fastest(work: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


if __name__ == "__main__":
    main()
