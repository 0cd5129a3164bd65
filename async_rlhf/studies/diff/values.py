"""The first numbers that differ, in two runs that are repeated up to there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from async_rlhf.generation.placement import shared_cores
from async_rlhf.run.folder import rollouts_file
from async_rlhf.studies.explain.repetition import (
    Part,
    Repetition,
    checkpoint_before,
    read_run,
    require_one_rank,
    started_in,
)
from async_rlhf.types import ScoredBatch

Found = dict[str, Any]


@dataclass(frozen=True)
class Repeated:
    """One batch of a run that was repeated."""

    scored: ScoredBatch
    before: Mapping[str, Tensor]
    """What is trained of the policy, by name, before the update: on the CPU."""
    after: Mapping[str, Tensor]
    experience: Mapping[str, Tensor]
    decode: Callable[[Any], str]
    """Makes a text of tokens."""


def repeat(name: str, batch: int, folder: Path, whole: bool = False) -> Repeated:
    """Repeat a run through a batch.

    Args:
        name: its folder.
        batch: the last one.
        folder: not there yet: gets what the run writes, in "run".
        whole: from the beginning, not from the newest checkpoint.

    Raises:
        ConfigError: it cannot be repeated.
    """
    run = Path(name).expanduser().resolve()
    original = read_run(str(run))
    require_one_rank(run, original)
    with chdir(started_in(run, original.train.output_dir)):
        checkpoint = checkpoint_before(run, original, 1 if whole else batch)
        repetition = Repetition(Part(run, original, checkpoint, batch, batch, range(0)), folder)
        trained, update = repetition.trainer.run, repetition.update
        named = [name for name, each in trained.learner.policy.named_parameters() if each.requires_grad]
        before, after = (
            {name: tensor.cpu() for name, tensor in zip(named, tensors, strict=True)}
            for tensors in (update.before, repetition.after)
        )
        scored = repetition.course.scored[batch]
        with shared_cores(trained.config, trained.device):  # sums depend on the threads
            experience = update.annotate(scored).tensors()
        return Repeated(scored, before, after, experience, trained.tokenizer.decode)


def first_values(names: Sequence[str], batch: int, part: str) -> Found | None:
    """Repeat two runs through a batch, and find the first number that differs; None if nothing does here.

    Args:
        names: their folders.
        batch: that differs.
        part: of it, what differs first by what the runs noted.
    """
    with tempfile.TemporaryDirectory(prefix="diff-") as scratch:
        a, b = (repeat(name, batch, Path(scratch, str(number))) for number, name in enumerate(names))
    return next(differing(a, b, part), None)


def kept_values(names: Sequence[str], batch: int) -> Found | None:
    """The first number of a batch that differs, if both runs have kept their rollouts; None if nothing does.

    Args:
        names: folders of the runs.
        batch: that differs.
    """
    from pyarrow.parquet import read_table

    paths = [rollouts_file(Path(name).expanduser(), batch) for name in names]
    if not all(path.is_file() for path in paths):
        return None
    ours, theirs = (read_table(path).to_pydict() for path in paths)
    rewards = [name for name in ours if name.startswith("reward/")]
    for name in (name for name in (*_DRAWN, *rewards, *_LEARNT) if name in ours and name in theirs):
        for sample, values in enumerate(zip(ours[name], theirs[name], strict=False), 1):
            if values[0] != values[1]:
                return {"what": name, "sample": sample} | _place(list(values))
    return None


def _place(values: list[Any]) -> Found:
    """Where two values differ, of which each may be a list with a number for each token."""
    if not all(isinstance(value, list) for value in values):
        return {"values": values} | _units(np.empty(0, np.float32), values)
    pairs = enumerate(zip_longest(*values))
    position, pair = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
    return {"position": position, "values": [*pair]} | _units(np.asarray(values[0], np.float32), pair)


_DRAWN = ("prompt_tokens", "tokens", "versions", "logprobs", "environment_rewards")
_LEARNT = ("score", "old_logprobs", "reference_logprobs", "advantages", "loss_weight")
"""Columns of rollouts, in the order in which they come to be; rewards are between them."""


def differing(a: Repeated, b: Repeated, part: str) -> Iterator[Found]:
    """The numbers that differ, the first ones first, beginning with a part of the batch."""
    if part == "weights":
        yield from _of_tensors("weight before the update", a.before, b.before)
    yield from _of_samples(a, b)
    for name in a.scored.rewards.keys() & b.scored.rewards.keys():
        yield from _of_tensors(f"reward/{name}", {"": a.scored.rewards[name]}, {"": b.scored.rewards[name]})
    yield from _of_tensors("score", {"": a.scored.scores_PK.flatten()}, {"": b.scored.scores_PK.flatten()})
    yield from _of_tensors("of the learner", a.experience, b.experience)
    yield from _of_tensors("weight after the update", a.after, b.after)


def _of_samples(a: Repeated, b: Repeated) -> Iterator[Found]:
    groups = [[(g.prompt, sample) for g in each.scored.batch.groups for sample in g.samples] for each in (a, b)]
    for number, ((prompt, ours), (other, theirs)) in enumerate(zip(*groups, strict=False), 1):
        here: Found = {"sample": number}
        if prompt.tokens != other.tokens:
            texts = [each.decode(list(asked.tokens)) for each, asked in ((a, prompt), (b, other))]
            yield here | {"what": "prompt", "rows": [prompt.row, other.row], "values": texts}
            continue
        for what in ("tokens", "versions", "logprobs", "rewards"):
            left, right = (getattr(sample, what) for sample in (ours, theirs))
            if left is None or right is None:
                continue
            same = min(len(left), len(right))
            places = np.flatnonzero(left[:same] != right[:same])
            if not len(places) and len(left) == len(right):
                continue
            place = int(places[0]) if len(places) else same
            values = [each[place].item() if place < len(each) else None for each in (left, right)]
            found = here | {"what": what.removesuffix("s"), "position": place, "values": values}
            if what == "tokens":
                found["texts"] = [x.decode([n]) if n is not None else "" for x, n in zip((a, b), values, strict=True)]
                found["drawn"] = bool(ours.sampled[place]) if place < len(ours) else None
            yield found | _units(left, values)


def _of_tensors(what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[Found]:
    for name in (name for name in ours if name in theirs):
        a, b = ours[name], theirs[name]
        if a.shape != b.shape:
            yield {"what": what, "tensor": name, "values": [f"shape {tuple(x.shape)}" for x in (a, b)]}
            continue
        places = ((a != b) & ~(a.isnan() & b.isnan())).nonzero()
        if len(places):
            place = places[0].tolist()
            values = [tensor[tuple(place)].item() for tensor in (a, b)]
            found = {"what": what, "tensor": name, "element": place, "values": values}
            yield found | {"differing": len(places), "of": a.numel()} | _units(a.float().numpy(), values)


def _units(like: np.ndarray, values: Sequence[Any]) -> Found:
    """How far two numbers of a float type are from each other, in units of rounding of the larger one."""
    if like.dtype.kind != "f" or None in values or not np.isfinite(values).all():
        return {}
    largest = np.abs(np.asarray(values, like.dtype)).max()
    return {"units": float(abs(values[0] - values[1]) / np.spacing(largest))}
