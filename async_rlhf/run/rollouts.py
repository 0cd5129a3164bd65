"""Every sample of a batch as a Parquet file, rollouts/batch-00000012.parquet; docs/rollouts.md has the columns.

A file appears whole, and before a checkpoint that was trained on its batch. So a run that is resumed deletes the files
of later batches, and writes them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

from async_rlhf.data.rendering import as_columns
from async_rlhf.data.tokenizer import decode_samples
from async_rlhf.models.chats import ROW_SETTING, setting_of
from async_rlhf.run.build import Run
from async_rlhf.run.folder import rollouts_file
from async_rlhf.system.files import whole_file
from async_rlhf.types import Experience, Prompt, Sample, ScoredBatch

_REPEATED = ["prompt", "prompt_messages", "columns", "finish_reason", *ROW_SETTING]
"""Columns that are smaller as numbers of different values; for numbers that draws decide it only takes time."""


def write_rollouts(run: Run, scored: ScoredBatch, experience: Experience) -> None:
    """Write every sample of a batch, one row each, into a file of its own. On rank 0.

    Args:
        run: with ``rollouts: all``.
        scored: the batch.
        experience: what the learner was trained on.
    """
    from pyarrow.parquet import write_table

    batch = scored.batch
    rows = [(group.prompt, n, sample) for group in batch.groups for n, sample in enumerate(group.samples)]
    texts = [*map(str, decode_samples(run.tokenizer, batch.samples))]
    numbers, strings = _of_samples(rows, texts, run.scorer.prompt_field)
    columns = {"batch": pa.array([batch.index] * len(rows), pa.int32())}
    columns |= {name: pa.array(values, kind) for name, (values, kind) in numbers.items()}
    columns |= {name: pa.array(values, pa.string()) for name, values in strings.items()}
    columns["prompt_tokens"] = _lists([prompt.tokens for prompt, *_ in rows], np.int32)
    by_token = {"tokens": np.int32, "sampled": np.bool_, "versions": np.int32, "logprobs": np.float32}
    by_token |= {"starts": np.int32}
    columns |= {name: _lists([getattr(s, name) for s in batch.samples], kind) for name, kind in by_token.items()}
    columns["environment_rewards"] = _lists([sample.rewards for sample in batch.samples], np.float32)
    columns["score"] = pa.array(scored.scores_PK.flatten().numpy(), from_pandas=True)
    columns |= {f"reward/{name}": pa.array(x_R.numpy(), from_pandas=True) for name, x_R in scored.rewards.items()}
    columns |= _of_learner(run.learner.annotated or experience, experience, scored)
    with whole_file(rollouts_file(run.folder.path, batch.index)) as file:
        write_table(pa.table(columns), file.buffer, compression="zstd", use_dictionary=_REPEATED)


def _of_samples(
    rows: Sequence[tuple[Prompt, int, Sample]], texts: Sequence[str], field: str
) -> tuple[dict[str, tuple[Any, pa.DataType]], dict[str, list[str | None]]]:
    """Numbers with their types, and texts, of all samples."""
    numbers = {
        "number": (np.arange(1, len(rows) + 1), pa.int32()),
        "draw": ([prompt.draw for prompt, *_ in rows], pa.int64()),
        "row": ([prompt.row for prompt, *_ in rows], pa.int64()),
        "sample": ([n for _, n, _ in rows], pa.int32()),
    }
    strings: dict[str, list[str | None]] = {"prompt": [str(prompt.columns[field]) for prompt, *_ in rows]}
    chats = [prompt.messages for prompt, *_ in rows]
    strings["prompt_messages"] = [None if chat is None else json.dumps([*map(dict, chat)]) for chat in chats]
    strings["completion"] = [*texts]
    strings["messages"] = [_conversation(prompt, sample) for prompt, _, sample in rows]
    strings["metrics"] = [json.dumps(dict(s.metrics)) if s.messages is not None else None for *_, s in rows]
    strings["finish_reason"] = [sample.finish_reason for *_, sample in rows]
    settings = [setting_of(prompt.columns, prompt.messages) for prompt, *_ in rows]
    for name in ROW_SETTING:
        values = [each.get(name) for each in settings]
        strings[name] = [x if x is None or isinstance(x, str) else json.dumps(x) for x in values]
    strings["columns"] = [_as_json(prompt.columns, {field, *ROW_SETTING}) for prompt, *_ in rows]
    return numbers, strings


def _conversation(prompt: Prompt, sample: Sample) -> str | None:
    """Of an episode, with the prompt if that is a chat."""
    if sample.messages is None:
        return None
    (messages,) = as_columns([prompt.messages or ()], [[*map(dict, sample.messages)]])["messages"]
    return json.dumps(messages)


def _as_json(columns: Mapping[str, Any], without: set[str]) -> str:
    """Those columns that JSON can hold."""
    texts = dict[str, str]()
    for name in columns.keys() - without:
        with suppress(TypeError, ValueError, RecursionError):
            texts[name] = json.dumps(columns[name], allow_nan=False)
    return "{" + ", ".join(f"{json.dumps(name)}: {texts[name]}" for name in columns if name in texts) + "}"


def _of_learner(annotated: Experience, experience: Experience, scored: ScoredBatch) -> dict[str, pa.Array]:
    """What the learner made of the samples; null of those that it left out, and where it computed nothing."""
    everyone = sample_numbers(annotated, scored)
    known = ("old_logprobs", "reference_logprobs")
    columns = {name: _by_token(annotated, f"{name}_BT", everyone, scored) for name in known}
    trained = sample_numbers(experience, scored)
    columns["advantages"] = _by_token(experience, "advantages_BT", trained, scored)
    weights_R = np.full(len(scored.batch.samples), np.nan, np.float32)
    weights_B = experience.loss_weights_U.repeat_interleave(experience.rows_per_unit).tolist()
    for number, weight in zip(trained, weights_B, strict=True):
        weights_R[number] = weight + np.nan_to_num(weights_R[number])
    return {**columns, "loss_weight": pa.array(weights_R, from_pandas=True)}


def sample_numbers(rows: Experience, scored: ScoredBatch) -> list[int]:
    """The number of each row's sample in its batch, from 0. Credit may have chosen and reordered rows, so they are
    found by what they hold; of equal samples one with the row's score, each once.
    """
    waiting: dict[bytes, list[int]] = {}
    for number, sample in enumerate(scored.batch.samples):
        waiting.setdefault(sample.tokens.tobytes() + sample.logprobs.tobytes(), []).append(number)
    scores, numbers = scored.scores_PK.flatten().tolist(), []
    tokens_BT, logprobs_BT = rows.tokens_BT.numpy().astype(np.int32), rows.behaviour_logprobs_BT.numpy()
    for b, (length, score) in enumerate(zip(rows.lengths_B.tolist(), rows.scores_B.tolist(), strict=True)):
        same = waiting[tokens_BT[b, :length].tobytes() + logprobs_BT[b, :length].tobytes()]
        number = next((number for number in same if scores[number] == score), same[0])
        numbers.append(number)
        if len(same) > 1:
            same.remove(number)
    return numbers


def _by_token(rows: Experience, name: str, numbers: Sequence[int], scored: ScoredBatch) -> pa.Array:
    found: list[np.ndarray | None] = [None] * len(scored.batch.samples)
    if (values_BT := getattr(rows, name)) is not None:
        for number, length, values_T in zip(numbers, rows.lengths_B.tolist(), values_BT.numpy(), strict=True):
            found[number] = values_T[:length]
    return _lists(found, np.float32)


def _lists(arrays: Sequence[Any], kind: Any) -> pa.Array:
    """A list of numbers for each; null for None."""
    ends = np.cumsum([0, *(0 if array is None else len(array) for array in arrays)], dtype=np.int32)
    values = np.concatenate([np.empty(0, kind), *(np.asarray(array, kind) for array in arrays if array is not None)])
    return pa.ListArray.from_arrays(ends, pa.array(values), mask=pa.array([array is None for array in arrays]))
