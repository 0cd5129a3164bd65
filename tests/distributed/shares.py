"""What each rank is sent for one batch. A rank of several; each writes down the bytes, and rank 0 those of all rows.

torchrun --nproc-per-node 3 tests/distributed/shares.py '[{"folder": "/tmp/shares"}]'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from ranks import new_policy
from tiny import new_args
from torch import Tensor

from async_rlhf.algorithms.table import find
from async_rlhf.config import ParallelConfig
from async_rlhf.learner.launch import start_ranks
from async_rlhf.learner.learner import Learner
from async_rlhf.learner.strategies.choice import make_parallel
from async_rlhf.types import Batch, Group, Prompt, Sample, ScoredBatch

PROMPTS, SAMPLES, LONGEST = 24, 4, 240


class Counted:
    """Counts the bytes that this rank is sent."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> Counted:
        named = [(dist, name) for name in ("recv", "irecv", "broadcast", "all_gather")]
        named += [(dist.distributed_c10d, name) for name in ("broadcast", "all_gather")]  # for objects
        for place, name in named:
            patch.object(place, name, self._counting(getattr(place, name))).start()
        return self

    def __exit__(self, *_: object) -> None:
        patch.stopall()

    def _counting(self, function: Any) -> Any:
        def counting(into: Tensor | list[Tensor], *args: Any, **options: Any) -> Any:
            self.bytes += sum(tensor.nbytes for tensor in ([into] if isinstance(into, Tensor) else into))
            return function(into, *args, **options)

        return counting


def scored_batch() -> ScoredBatch:
    """Completions of many lengths, with scores that differ."""
    random = np.random.default_rng(0)
    groups = []
    for number in range(PROMPTS):
        prompt = Prompt(number, number, tuple(random.integers(1, 250, 8).tolist()))
        answers = []
        for _ in range(SAMPLES):
            length = int(random.integers(20, LONGEST - 8))
            tokens, logprobs = random.integers(1, 250, length), -random.random(length)
            answers.append(Sample.answer(prompt.tokens, tokens, logprobs, [0] * length, "length"))
        groups.append(Group(prompt, tuple(answers)))
    scores_PK = torch.from_numpy(random.random((PROMPTS, SAMPLES))).float()
    return ScoredBatch(Batch(1, 0, tuple(groups), 0.0), scores_PK, {})


def step(folder: str, planted: bool = False) -> None:
    """Annotate and train on one batch; with a planted fault, rank 0 also tells the others all of it."""
    args = new_args(
        Path(folder),
        algorithm="grpo",
        samples_per_prompt=SAMPLES,
        num_mini_batches=2,
        total_episodes=96,
        annotate_batch_size=4,
        parallel=ParallelConfig(strategy="ddp"),
    )
    ranks = start_ranks(args)
    policy = new_policy(max_position_embeddings=LONGEST)
    learner = Learner(policy, None, find("grpo"), args, parallel=make_parallel(args, ranks))
    scored = scored_batch() if ranks.is_main else ScoredBatch(Batch(1, 0, (), 0.0), torch.zeros(0, 0), {})
    with Counted() as counted:
        if planted:
            ranks.broadcast("a fault", lambda: scored)
        experience, _ = learner.annotate(scored)
        metrics = learner.update(experience, 1)
    found = {"bytes": counted.bytes, "rows": len(experience), "metrics": len(metrics)}
    if ranks.is_main:
        tensors = experience.tensors()
        # 4 bytes a number, tokens too: two numbers twice to annotate, by reference and policy, and all to train.
        numbers = 2 * 2 + sum(name.endswith("_BT") for name in tensors)
        found["all"] = int(experience.lengths_B.sum()) * 4 * numbers
    path = Path(folder) / f"{'planted' if planted else 'right'}-{ranks.rank}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for run in json.loads(sys.argv[1]):
        step(**run)
