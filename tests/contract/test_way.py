"""The way of one batch: how many files of the package the learner's main thread enters for it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from environments import Echo
from tiny import count_letters
from transformers import TrainerCallback

import async_rlhf
from async_rlhf import KLConfig
from async_rlhf.run.trainer import OnlineTrainer

ROOT = Path(__file__).parents[2]
PACKAGE = str(Path(async_rlhf.__file__).parent)


class Traced(TrainerCallback):
    """Notes which files a batch enters, in their order, and how often the way goes from one file to another."""

    def __init__(self, batch: int) -> None:
        self.batch, self.files, self.moves = batch, dict[str, int](), dict[tuple[str, str], int]()

    def on_step_begin(self, args, state, control, **_):
        batch = state.global_step + 1
        if batch in (self.batch, self.batch + 1):
            sys.setprofile(self._enter if batch == self.batch else None)

    def _enter(self, frame: FrameType, event: str, _: object) -> None:
        name, caller = frame.f_code.co_filename, frame.f_back
        if event != "call" or not name.startswith(PACKAGE):
            return
        file = name[len(PACKAGE) + 1 :]
        self.files[file] = self.files.get(file, 0) + 1
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != name:
            move = caller.f_code.co_filename[len(PACKAGE) + 1 :], file
            self.moves[move] = self.moves.get(move, 0) + 1


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ordinary": (34, {}),
    "environment": (36, {"max_turns": 2, "episode_length": 24, "response_length": 8}),
    "inline": (42, {"placement": "inline"}),
    "saving": (51, {}),
}
"""Of a kind of batch: at most so many files, which a reader who follows it enters; and settings of generation."""


@pytest.mark.parametrize("kind", WAYS)
def test_one_batch_enters_few_files(make_policy, make_reward_model, tokenizer, prompts, make_args, kind):
    """GRPO with a reward model, a reward function and a reference; but inline one step off-policy, and in a process."""
    most, generation = WAYS[kind]
    sizes = {"samples_per_prompt": 2, "staleness": int(kind != "inline"), "save_steps": int(kind == "saving")}
    args = make_args("run", {"placement": "process", **generation}, "grpo", kl=KLConfig(coef=0.02), **sizes)
    traced, models = Traced(3), {"model": make_policy(), "reward_model": make_reward_model()}
    OnlineTrainer(
        args=args,
        train_dataset=prompts,
        reward_funcs=count_letters,
        processing_class=tokenizer,
        callbacks=[traced],
        environment=Echo if kind == "environment" else None,
        **models,
    ).train()
    for (old, new), count in sorted(traced.moves.items(), key=lambda move: -move[1]):
        print(f"{count:4d} {old} -> {new}")
    print(f"{kind}: {len(traced.files)} files, {sum(traced.moves.values())} moves: {', '.join(traced.files)}")
    assert "models/forward.py" in traced.files
    assert len(traced.files) <= most, traced.files
    if kind == "ordinary":
        # A worker that is busy gets its request later, by the supervisor's thread.
        entered = traced.files.keys() | {"generation/process.py"}
        assert drawn() | {"types.py"} == entered, "docs/figures/way.svg is another way"


def drawn() -> set[str]:
    """The files in the picture of the way."""
    way = runpy.run_path(str(ROOT / "scripts" / "figures.py"))["WAY"]
    rooms = [room.partition("/") for _, *each in way.values() for room in each]
    return {f"{room}/{file}.py" for room, _, files in rooms for file in files.split()}
