"""What the digests of a batch cost: seconds for 512 samples of 600 tokens, and for the states of random generators."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from smallest import parse

from async_rlhf.run.loop import digest, digests_of
from async_rlhf.system import random_state
from async_rlhf.types import Batch, Experience, Group, Prompt, Sample, ScoredBatch


def batch(prompts: int, samples: int, before: int, after: int) -> tuple[ScoredBatch, Experience]:
    """A batch of that many samples, with a reference and advantages."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(prompts):
        prompt = Prompt(number, number, tuple(rng.integers(0, 1000, before).tolist()))
        drawn = [(rng.integers(0, 1000, after), rng.normal(size=after), np.zeros(after)) for _ in range(samples)]
        groups.append(Group(prompt, tuple(Sample.answer(prompt.tokens, *each, "stop") for each in drawn)))
    rows, length = prompts * samples, before + after
    numbers_BT = torch.randn(rows, length)
    named = ("sampled", "behaviour_logprobs", "rewards", "advantages", "reference_logprobs", "old_logprobs")
    experience = Experience(
        tokens_BT=torch.zeros(rows, length, dtype=torch.long),
        lengths_B=torch.full((rows,), length),
        scores_B=numbers_BT[:, 0],
        loss_weights_U=numbers_BT[:, 0],
        **{f"{name}_BT": numbers_BT for name in named},
    )
    scored = ScoredBatch(Batch(1, 0, tuple(groups), 0.0), torch.randn(prompts, samples), {}, {"a": torch.randn(rows)})
    return scored, experience


def seconds(work: Callable[[], object], times: int) -> float:
    """The fastest of several."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


if __name__ == "__main__":
    arguments = parse(argparse.ArgumentParser(description=__doc__))
    sizes = (4, 2, 10, 10) if arguments.smallest else (128, 4, 100, 500)
    parts, times = batch(*sizes), 2 if arguments.smallest else 20
    torch.set_num_threads(1)
    taken = seconds(lambda: digests_of(*parts), times)
    print(f"{sizes[0] * sizes[1]} samples of {sizes[2] + sizes[3]} tokens: {taken:.4f} s")
    states = seconds(lambda: digest(repr(random_state.capture())), times)
    print(f"states of random generators: {states:.4f} s")
