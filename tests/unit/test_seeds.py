"""A seed says what reward functions draw from the global random generators: in every command, and in workers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import PROMPTS, new_policy

from async_rlhf.commands.evaluate import run_evaluate
from async_rlhf.commands.pairs import run_pairs
from async_rlhf.commands.relabel import run_relabel
from async_rlhf.commands.stage import json_lines
from async_rlhf.config import EvaluateConfig, PairsConfig, RelabelConfig
from async_rlhf.generation import worker
from async_rlhf.generation.protocol import SamplingParams
from async_rlhf.models.saving import write_model
from async_rlhf.run.trainer import OnlineTrainer

DRAWS = """
import random
import numpy as np
import torch

def draws(completions, **columns):
    return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in completions]
"""


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def forget() -> None:
    """Bring the generators to where nobody has been before."""
    random.seed()
    np.random.seed()
    torch.seed()


@pytest.fixture
def place(tmp_path: Path, tokenizer) -> Path:
    write_model(new_policy(), tokenizer, tmp_path / "model")
    (tmp_path / "judge.py").write_text(DRAWS)
    (tmp_path / "prompts.jsonl").write_text(json_lines([{"query": f"p{i}"} for i in range(8)]))
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text(json_lines(rows))
    return tmp_path


def test_commands(place):
    judge, model = [f"{place / 'judge.py'}:draws"], str(place / "model")

    def pairs(seed: int, out: Path) -> str:
        sampling = {"samples_per_prompt": 3, "response_length": 4, "max_prompt_length": 20, "device": "cpu"}
        files = {"model": model, "prompts": str(place / "prompts.jsonl"), "output": str(out / "pairs.jsonl")}
        run_pairs(PairsConfig(**files, reward_funcs=judge, seed=seed, **sampling))
        return (out / "pairs.jsonl").read_text()

    def evaluate(seed: int, out: Path) -> str:
        sampling = {"response_length": 4, "max_prompt_length": 20, "device": "cpu"}
        files = {"models": {"one": model}, "data": str(place / "prompts.jsonl"), "output_dir": str(out)}
        run_evaluate(EvaluateConfig(**files, reward_funcs=judge, seed=seed, **sampling))
        return (out / "samples.jsonl").read_text()

    def relabel(_: int, out: Path) -> str:
        data = str(place / "train.jsonl")
        run_relabel(RelabelConfig(data=data, output_dir=str(out), reward_funcs=judge, device="cpu"))
        return (out / "train.jsonl").read_text()

    for command in (pairs, evaluate, relabel):
        found = []
        for number, seed in enumerate((5, 5, 6)):
            forget()
            found.append(command(seed, place / f"{command.__name__}{number}"))
        assert found[0] == found[1]
        assert (found[1] == found[2]) == (command is relabel)  # which has no seed


def test_training(place, make_args, tokenizer):
    scores = []
    for number, seed in enumerate((5, 5, 6)):
        forget()
        args = replace(make_args(f"run{number}"), seed=seed)
        trainer = OnlineTrainer(
            new_policy(), args, PROMPTS, reward_funcs=lambda completions, **_: [sum(drawn()) for _ in completions],
            processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        lines = (Path(args.output_dir) / "metrics.jsonl").read_text().splitlines()
        scores.append([json.loads(line)["objective/scores"] for line in lines])
    assert scores[0] == scores[1] != scores[2]


def test_generators(monkeypatch):
    monkeypatch.setattr(
        worker, "make_engine", lambda _, params: SimpleNamespace(heartbeat_with=lambda _: None, params=params)
    )
    found = []
    for seed in (5, 5, 6):
        forget()
        params = SamplingParams(1, 1.0, 4, (256,), seed)
        worker.build_handler(SimpleNamespace(num_threads=None), params, None, lambda: None)
        found.append(drawn())
    assert found[0] == found[1] != found[2]
