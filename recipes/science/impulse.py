"""The impulse response of stale batches: what a synchronous run loses where a few of its batches are old.

    python recipes/science/impulse.py --out runs/science/impulse --parallel 2

needs what sorting.yml needs. For each objective and seed a synchronous run is made; then branches of it, each from a
checkpoint, bit for bit, in which some batches in a row are sampled by the weights of S batches before, with the same
prompts and the same random numbers. All else stays synchronous. What is followed is the probability of the right
answer, a mean over the held-out lists: it has no sampling noise. Branches whose one batch has other random numbers
instead show how much a run differs by chance. Whole runs at staleness S show what all stale batches do together.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from async_rlhf.commands.train import make_trainer
from async_rlhf.config.parsing import parse
from async_rlhf.run.config import RunConfig
from async_rlhf.run.trainer import OnlineTrainer
from async_rlhf.system.files import whole_file

HERE = Path(__file__).parent
OBJECTIVES = ("online_dpo", "online_dpo, anchored", "rloo")
"""Of robustness.yml."""
AGES = (4, 16)
BETWEEN = 12
"""Batches between two checkpoints; a branch begins at each."""
IN_A_ROW = (2, 4, 8, 16, 32)
"""How many batches are old, besides one, at the larger age."""
LATER = (0, 1, 2, 4, 8, 16)
"""Batches after the last one that is old, after which a branch is looked at."""
OTHER = 1_000_003
"""Added to the seed of a batch with other random numbers."""

Weights = list[Tensor]


@dataclass(frozen=True)
class Branch:
    """Some batches of a run, and how they are sampled."""

    first: int
    count: int = 1
    age: int = 0
    """S: by the weights of S batches before those that a synchronous run would take."""
    other: bool = False
    """With other random numbers."""


AS_IT_IS = Branch(first=0, count=0)


class Watched(TrainerCallback):
    """Exchanges the weights while an old batch is sampled, and notes how likely right answers are after each batch.

    Args:
        trainer: of a synchronous run with inline generation, which samples a batch between the end of the one before it
            and its own begin.
        right: the held-out lists.
        looks: the batches after which they are looked at; the run ends after the last of them.
        versions: the weights after each batch that is known; those of this run are added.
        branch: what is sampled otherwise.
    """

    def __init__(
        self, trainer: OnlineTrainer, right: Answers, looks: Sequence[int], versions: dict[int, Weights], branch: Branch
    ) -> None:
        self._trainer, self._right, self._looks, self._branch = trainer, right, looks, branch
        self._versions, self._params = versions, trainer.run.engine.params
        self._now: Weights | None = None
        self.found: dict[int, float] = {}

    def _prepare(self, batch: int) -> None:
        """Exchange what the batch is sampled with, if it is one of those."""
        branch = self._branch
        if not branch.first <= batch < branch.first + branch.count:
            return
        if branch.other:
            self._trainer.run.engine.params = replace(self._params, seed=self._params.seed + OTHER)
        if branch.age:
            self._now = self._versions[batch - 1]
            put(self._trainer, self._versions[max(0, batch - 1 - branch.age)])

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before the first batch is sampled."""
        self._versions[state.global_step] = weights(self._trainer)
        self._prepare(state.global_step + 1)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After a batch has been sampled, before it is scored."""
        self._trainer.run.engine.params = self._params
        if self._now is not None:
            put(self._trainer, self._now)
            self._now = None

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After the update, before the next batch is sampled."""
        batch = state.global_step
        self._versions[batch] = weights(self._trainer)
        if batch in self._looks:
            self.found[batch] = self._right.probability(self._trainer)
        control.should_training_stop = control.should_training_stop or batch == self._looks[-1]
        if not control.should_training_stop and batch < state.max_steps:
            self._prepare(batch + 1)


def weights(trainer: OnlineTrainer) -> Weights:
    """A copy of the policy."""
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def put(trainer: OnlineTrainer, values: Weights) -> None:
    """Make these the policy's weights."""
    with torch.no_grad():
        for parameter, value in zip(trainer.model.parameters(), values, strict=True):
            parameter.copy_(value)


class Answers:
    """Held-out prompts with their right answers, as the policy itself writes them: answer and end."""

    def __init__(self, rows: Sequence[dict[str, str]], trainer: OnlineTrainer) -> None:
        tokenizer = trainer.processing_class
        (end,) = trainer.run.engine.params.stop_token_ids
        texts = [(tokenizer(row["query"])["input_ids"], tokenizer(" " + row["answer"])["input_ids"]) for row in rows]
        longest = max(len(prompt) + len(answer) + 1 for prompt, answer in texts)
        self._tokens_BT = torch.zeros(len(rows), longest, dtype=torch.long)
        self._asked_BT = torch.zeros(len(rows), longest)
        for i, (prompt, answer) in enumerate(texts):
            row = torch.tensor([*prompt, *answer, end])
            self._tokens_BT[i, : len(row)] = row
            self._asked_BT[i, len(prompt) : len(row)] = 1

    @torch.no_grad()
    def probability(self, trainer: OnlineTrainer) -> float:
        """Of the right answer, a mean over prompts, at the temperature of training."""
        logits_BTV = trainer.model(self._tokens_BT).logits[:, :-1]  # rows are padded on the right: nothing sees it
        logits_BTV = logits_BTV / trainer.run.engine.params.temperature
        logprobs_BT = logits_BTV.log_softmax(-1).gather(-1, self._tokens_BT[:, 1:, None]).squeeze(-1)
        return float((logprobs_BT * self._asked_BT[:, 1:]).sum(1).exp().mean())


@dataclass(frozen=True)
class Study:
    """Of one objective with one seed.

    Args:
        base: the YAML file of the run.
        objective: its name, and the keys that it sets.
        seed: of the run.
        held_out: rows with ``query`` and ``answer``.
        out: a folder.
    """

    base: Path
    objective: str
    keys: dict[str, Any]
    seed: int
    held_out: Path
    out: Path

    def rows(self) -> Iterator[dict[str, Any]]:
        """The results, each with what was looked at after which batch."""
        looks = range(1, self.config("base", {}).train.num_batches + 1)
        versions: dict[int, Weights] = {}
        base = self.run("base", AS_IT_IS, looks, versions, save_steps=BETWEEN)
        yield self._row("base", AS_IT_IS, base)
        for age in AGES:
            found = self.run("lag", AS_IT_IS, looks, {}, staleness=age)
            yield self._row(f"S = {age}", AS_IT_IS, found)
        for branch in branches(looks.stop - 1):
            last = branch.first + branch.count - 1
            seen = [last + later for later in LATER if last + later < looks.stop]
            start = self.out / "base" / f"checkpoint-{branch.first - 1}"
            found = self.run("branch", branch, seen, dict(versions), resume_from=str(start))
            yield self._row("branch", branch, {batch: p - base[batch] for batch, p in found.items()})

    def _row(self, kind: str, branch: Branch, found: dict[int, float]) -> dict[str, Any]:
        rounded = {batch: round(p, 6) for batch, p in found.items()}
        return {"objective": self.objective, "seed": self.seed, "kind": kind, **vars(branch), "right": rounded}

    def config(self, name: str, changes: dict[str, Any]) -> RunConfig:
        """Of a run in a folder of this name, with other keys of ``train``."""
        told = {**self.keys, "train.output_dir": str(self.out / name), "train.seed": self.seed}
        arguments = [word for key, value in told.items() for word in (f"--{key}", str(value))]
        config, _ = parse(RunConfig, "train", ["--config", str(self.base), *arguments])
        quiet = {"progress": False, "report": False, "report_to": [], "trace": False, "overwrite_output_dir": True}
        return replace(config, train=replace(config.train, **quiet, **changes))

    def run(
        self, name: str, branch: Branch, looks: Sequence[int], versions: dict[int, Weights], **changes: Any
    ) -> dict[int, float]:
        """Train; see :class:`Watched` for what the arguments say, and returns.

        Args:
            name: of its folder, which is replaced.
            branch: see there, as the next two.
            looks: see there.
            versions: see there.
            changes: other keys of ``train``.
        """
        config = self.config(name, changes)
        if branch.other:  # or the run is ended: it notices that these are not its random numbers
            generation = replace(config.train.generation, mismatch_samples=0)
            config = replace(config, train=replace(config.train, generation=generation))
        trainer = make_trainer(config)
        rows = [json.loads(line) for line in self.held_out.read_text().splitlines()]
        watched = Watched(trainer, Answers(rows, trainer), looks, versions, branch)
        trainer.add_callback(watched)
        trainer.train()
        return watched.found


def branches(batches: int) -> Iterator[Branch]:
    """All of a run: one batch that is old, or drawn anew, at each checkpoint, and more in a row at every third."""
    firsts = [batch + 1 for batch in range(BETWEEN, batches, BETWEEN) if batch >= max(AGES) and batch + 1 <= batches]
    for place, first in enumerate(firsts):
        yield Branch(first, other=True)
        yield from (Branch(first, age=age) for age in AGES)
        if place % 3 == 0:
            yield from (Branch(first, n, max(AGES)) for n in IN_A_ROW if first + n - 1 + max(LATER) <= batches)


def study(task: Study) -> Path:
    """Do one, unless it is done; returns the file with its results."""
    torch.set_num_threads(1)
    done = task.out.with_suffix(".jsonl")
    if not done.exists():
        rows = list(task.rows())
        with whole_file(done) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        shutil.rmtree(task.out)
    return done


def main() -> None:
    """Do all, and put their results into one file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/science/impulse"), help="a folder")
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), help="names of robustness.yml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time, each with one thread")
    wanted = parser.parse_args()
    known = yaml.safe_load((HERE / "robustness.yml").read_text())["grid"]["algorithm"]
    if unknown := set(wanted.objectives) - set(known):
        parser.error(f"--objectives: got {sorted(unknown)}; must be among {list(known)}")
    wanted.out.mkdir(parents=True, exist_ok=True)
    start, held_out = "runs/science/sorting/sft", Path("runs/science/sorting/heldout.jsonl")
    make = partial(Study, HERE / "sorting.yml")
    tasks = [
        make(name, {**known[name], "model": start}, seed, held_out, wanted.out / f"{name.replace(', ', '-')}-{seed}")
        for seed in wanted.seeds
        for name in wanted.objectives
    ]
    with ProcessPoolExecutor(wanted.parallel, get_context("spawn")) as pool:
        parts = list(pool.map(study, tasks))
    with whole_file(wanted.out / "results.jsonl") as file:
        for part in parts:
            file.write(part.read_text())
    print(f"results of {len(parts)} runs and their branches in {wanted.out / 'results.jsonl'}")


if __name__ == "__main__":
    main()
