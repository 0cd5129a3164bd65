"""Tasks of the reasoning-gym library: rows of data, and the tasks' own scorers as a reward function.

Needs the extra ``pip install 'async-rlhf[reasoning-gym]'``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from async_rlhf.config.base import ConfigError, require
from async_rlhf.models.thoughts import answer_of

logger = logging.getLogger(__name__)

INSTRUCTION = "Think step by step, then give the final answer alone between <answer> and </answer>."


def make_rows(
    task: str, size: int, seed: int, options: Mapping[str, Any] | None = None, instruction: str = INSTRUCTION
) -> Iterator[dict[str, Any]]:
    """Data for a task: rows of `query`, `answer`, `task` and `metadata`, which is JSON for :func:`score`.

    Args:
        task: its name in the library, such as "leg_counting".
        size: number of rows.
        seed: decides the rows; equal seeds give equal rows.
        options: of the task, such as its difficulty.
        instruction: text of the prompt after the question.

    Raises:
        ConfigError: there is no such task or option, or the task refuses a value.
    """
    library = _library()
    _check_task(task)
    try:
        dataset = library.create_dataset(task, size=size, seed=seed, **(options or {}))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"options: got {dict(options or {})}; {task} refuses them: {error}") from error
    for entry in dataset:
        yield {
            "query": "\n\n".join(part for part in (entry["question"].strip(), instruction) if part) + "\n",
            "answer": entry["answer"],
            "task": task,
            "metadata": json.dumps(_encode(entry["metadata"]), ensure_ascii=False),
        }


def score(
    prompts: Sequence[str],
    completions: Sequence[str],
    task: Sequence[str],
    answer: Sequence[Any],
    metadata: Sequence[str],
    **columns: Any,
) -> list[float]:
    """The library's own score of each completion, from 0 to 1, for rows of :func:`make_rows`.

    The answer is the text in the last pair of ``<answer>`` tags, or without tags the whole completion. An answer that
    makes a scorer raise scores 0. What was thought is no part of it.
    """
    rows = zip(prompts, completions, task, answer, metadata, strict=True)
    return [
        _score(
            name, answer_of(text, prompt), {"question": prompt, "answer": truth, "metadata": _decode(json.loads(known))}
        )
        for prompt, text, name, truth, known in rows
    ]


vars(score)["by_prompt"] = True


def _score(task: str, completion: str, entry: dict[str, Any]) -> float:
    scorer = _scorer(task)
    answer = _library().utils.extract_answer(completion)
    try:
        return float(scorer(completion.strip() if answer is None else answer, entry))
    except Exception as error:  # of any kind: some scorers assume that a model's text is well-formed
        logger.debug("%s cannot read %r: %s: %s", task, completion[-200:], type(error).__name__, error)
        return 0.0


@cache
def _scorer(task: str) -> Any:
    _check_task(task)
    return _library().get_score_answer_fn(task)


def _check_task(task: str) -> None:
    known = sorted(_library().factory.DATASETS)
    require(task in known, "task", task, f"must be one of {', '.join(known)}")


@cache
def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        rule = "needs the library reasoning-gym: pip install 'async-rlhf[reasoning-gym]'"
        raise ConfigError(f"async_rlhf.rewards.reasoning_gym {rule} ({error})") from error
    return reasoning_gym


def _encode(value: Any) -> Any:
    """For JSON, keeping tuples distinct from lists: some scorers compare with one, some with the other."""
    if isinstance(value, tuple):
        return {"__tuple__": [_encode(item) for item in value]}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    return {key: _encode(item) for key, item in value.items()} if isinstance(value, dict) else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"__tuple__"}:
            return tuple(_decode(item) for item in value["__tuple__"])
        return {key: _decode(item) for key, item in value.items()}
    return value
