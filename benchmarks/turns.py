"""What the engine on transformers saves by going on from the last turn instead of computing all of it again.

    python benchmarks/turns.py [--rows 16] [--rounds 5]

16 episodes with answers of 16 tokens, by a GPT-NeoX with random weights, on one thread. Both ways take turns, round by
round, in an order that changes. Ratios are within a round: median, lowest and highest. Both draw the same tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from smallest import parse
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.generation.transformers_engine import TransformersEngine
from async_rlhf.types import Turn

VOCABULARY, ANSWER = 2048, 16
EPISODES = [(32, 4, 16), (128, 4, 64), (512, 6, 64)]
"""Tokens of the prompt, turns, tokens between two of them."""


def engine(hidden: int, layers: int, rows: int) -> TransformersEngine:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": layers, "num_attention_heads": hidden // 32}
    widths = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "max_position_embeddings": 2048}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, **widths, **shape, eos_token_id=None)).eval()
    return TransformersEngine(model, SamplingParams(1, 0.7, ANSWER, (VOCABULARY - 1,), 0, batch_size=rows))


def play(engine: TransformersEngine, rows: int, size: tuple[int, int, int], goes_on: bool) -> tuple[float, list[int]]:
    """Seconds, and the drawn tokens."""
    prompt, turns, between = size
    chance, drawn, pasts = random.Random(0), [], [None] * rows

    def some(count: int) -> list[tuple[int, ...]]:
        return [tuple(chance.choices(range(VOCABULARY - 1), k=count)) for _ in range(rows)]

    texts, started = some(prompt), time.perf_counter()
    for turn in range(turns):
        asked = [
            Turn(n, n, text, offset=turn << 10, limit=ANSWER, past=past if goes_on else None)
            for n, (text, past) in enumerate(zip(texts, pasts, strict=True))
        ]
        answers = [answer for (answer,) in engine.generate(asked)]
        drawn += [token for answer in answers for token in answer.drawn.tolist()]
        pasts = [answer.past for answer in answers]
        texts = [(*answer.tokens.tolist(), *more) for answer, more in zip(answers, some(between), strict=True)]
    return time.perf_counter() - started, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parse(parser, rows=2, rounds=1)
    torch.set_num_threads(1)
    print("| hidden size, layers | prompt | turns | between two | all again / going on |\n|---|---|---|---|---|")
    for hidden, layers in ((64, 2),) if options.smallest else ((128, 4), (512, 8)):
        one = engine(hidden, layers, options.rows)
        for size in EPISODES:
            ratios = []
            for number in range(options.rounds):
                ways = (True, False) if number % 2 else (False, True)
                found = {goes_on: play(one, options.rows, size, goes_on) for goes_on in ways}
                if found[True][1] != found[False][1]:
                    raise SystemExit("the two ways drew different tokens")
                ratios.append(found[False][0] / found[True][0])
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {hidden}, {layers} | {size[0]} | {size[1]} | {size[2]} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
