"""Inspect: the answers to held-out sums, as chats. See recipes/evaluation/README.md."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import match
from inspect_ai.solver import generate

DATA = Path(__file__).parents[2] / "runs" / "smollm" / "sums" / "held_out.jsonl"


@task
def sums():
    """Right where the last number is the sum."""
    return Task(
        dataset=json_dataset(str(DATA), FieldSpec(input="messages", target="answer")),
        solver=generate(),
        scorer=match(location="end", numeric=True),
        config=GenerateConfig(temperature=0, max_tokens=12),
    )
