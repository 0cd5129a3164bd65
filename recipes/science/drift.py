"""How far a synchronous run's policy moves in S batches: does it say what staleness S would cost?

    python recipes/science/drift.py --out runs/science/drift --parallel 2

needs what sorting.yml needs. A run at staleness S trains on what the weights of S batches ago have sampled. So each
objective of robustness.yml is trained synchronously, and before every update the completions of S batches ago are seen
again: how likely the policy finds them now tells the importance ratios that a run at staleness S would begin with.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
import yaml
from impulse import HERE, Study
from transformers import TrainerCallback, TrainerControl, TrainerState

from async_rlhf.commands.train import make_trainer
from async_rlhf.models.forward import response_logprobs
from async_rlhf.models.rows import sampled_rows
from async_rlhf.rewards.scorer import Scorer
from async_rlhf.run.trainer import OnlineTrainer, train
from async_rlhf.system.files import whole_file
from async_rlhf.types import Batch, Sample, ScoredBatch

AGES = (1, 4, 16)
MEASURES = ("kl", "ess", "second_moment")
"""KL from the policy that sampled to the one now, nats a completion; the completions' effective sample size, as a share
of them; the mean squared ratio of tokens."""


class Seen(TrainerCallback):
    """A scorer that keeps the last batches, and a callback that looks at them again after each update."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        self._trainer = trainer
        self._samples: deque[list[Sample]] = deque(maxlen=max(AGES) + 1)
        self.found: dict[int, list[tuple[float, ...]]] = {age: [] for age in AGES}

    def __call__(self, batch: Batch) -> ScoredBatch:
        """Score a batch."""
        self._samples.append(batch.samples)
        return self._trainer.run.scorer(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.run.scorer, name)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After an update: the newest batch that is kept was sampled one update ago."""
        for age, found in self.found.items():
            if age <= len(self._samples) and state.global_step < state.max_steps:
                found.append(ratios(self._trainer, self._samples[-age]))


@torch.no_grad()
def ratios(trainer: OnlineTrainer, samples: list[Sample]) -> tuple[float, ...]:
    """MEASURES of the policy as it is now to the one that sampled."""
    rows = sampled_rows(samples)
    now_BT = response_logprobs(
        trainer.model,
        rows["tokens_BT"],
        rows["sampled_BT"],
        trainer.args.generation.temperature,
        with_entropies=False,
        positions_BT=rows.get("positions_BT"),
    ).logprobs_BT
    log_BT = ((now_BT - rows["behaviour_logprobs_BT"]) * rows["sampled_BT"]).double()
    log_B = log_BT.sum(dim=1)
    weights_B = (log_B - log_B.max()).exp()  # the size of all weights together does not matter
    ess = weights_B.sum().square() / (len(weights_B) * weights_B.square().sum())
    squares = (2 * log_BT[rows["sampled_BT"] > 0]).exp()
    return -log_B.mean().item(), ess.item(), squares.mean().item()


def drifts(study: Study) -> Iterator[dict[str, Any]]:
    """Means over the batches of a synchronous run, for each age."""
    torch.set_num_threads(1)
    trainer = make_trainer(study.config("run", {}))
    seen = Seen(trainer)
    trainer.add_callback(seen)
    train(replace(trainer.run, scorer=cast(Scorer, seen)))
    for age, found in seen.found.items():
        means = map(fmean, zip(*found, strict=True))
        told = {name: round(mean, 5) for name, mean in zip(MEASURES, means, strict=True)}
        yield {"objective": study.objective, "seed": study.seed, "age": age, "batches": len(found), **told}


def drift(study: Study) -> list[dict[str, Any]]:
    """All of one run."""
    return list(drifts(study))


def main() -> None:
    """Do all, and put their results into one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/science/drift"), help="a folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with one thread")
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    known = yaml.safe_load((HERE / "robustness.yml").read_text())["grid"]["algorithm"]
    held_out = Path("runs/science/sorting/heldout.jsonl")
    tasks = [
        Study(HERE / "sorting.yml", name, keys, seed, held_out, wanted.out / f"{name.replace(', ', '-')}-{seed}")
        for seed in wanted.seeds
        for name, keys in known.items()
    ]
    with ProcessPoolExecutor(wanted.parallel, get_context("spawn")) as pool:
        parts = list(pool.map(drift, tasks))
    with whole_file(wanted.out / "results.jsonl") as file:
        file.writelines(json.dumps(row) + "\n" for part in parts for row in part)
    print(f"results of {len(parts)} runs in {wanted.out / 'results.jsonl'}")


if __name__ == "__main__":
    main()
