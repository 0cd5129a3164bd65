"""Relabels preference pairs: the side that a gold reward scores higher becomes `chosen`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rlhf.commands.distributed import done_by, lead_first, on_ranks
from async_rlhf.commands.evaluation.reward_judge import RewardJudge
from async_rlhf.commands.evaluation.statistics import wilson
from async_rlhf.commands.stage import Stage, json_lines
from async_rlhf.config import ConfigError, RelabelConfig
from async_rlhf.data.formats import SIDES, RowReader, asked_of, has_ended
from async_rlhf.data.loading import Rows, load_rows
from async_rlhf.data.ratings import pairs_of_rollouts
from async_rlhf.data.rendering import Renderer, as_columns
from async_rlhf.distributed.collectives import Ranks
from async_rlhf.learner.launch import rank_device
from async_rlhf.models.chats import Message

logger = logging.getLogger(__name__)


def run_relabel(config: RelabelConfig) -> dict[str, Any]:
    """Score both sides of every pair, swap them where the rejected one scores higher, and write the rows.

    Every row keeps its columns and gets `chosen_score`, `rejected_score` and `swapped`. Columns about one side, such as
    `chosen_finish_reason`, are swapped with it.

    Returns:
        For every split: pairs, ties (equal scores), swapped, agreement (share of the other pairs whose labels
        matched the gold reward) with its 95% interval (Wilson), written, and score_margin (mean over written pairs).

    Raises:
        ConfigError: see the message.
    """
    folder = Path(config.output_dir)
    outputs = {split: folder / f"{split}.jsonl" for split in config.splits}
    inputs = {key: getattr(config, key) for key in ("data", "reward_model", "reward_funcs", "reward_tokenizer")}
    stage = Stage(folder, "relabel", config, inputs, outputs=tuple(outputs.values()), marker_name=".relabel")
    if len(config.splits) > 1 and Path(config.data).expanduser().is_file():
        raise ConfigError(f"splits: got {config.splits} of one file, {config.data!r}; must be one, or data a folder")
    with on_ranks(config, "relabel") as ranks:
        if (results := done_by(stage, ranks)) is None:
            results = _relabelled_splits(config, stage, outputs, ranks)
    return results


def _relabelled_splits(
    config: RelabelConfig, stage: Stage, outputs: Mapping[str, Path], ranks: Ranks
) -> dict[str, Any]:
    data = lead_first(
        ranks, "reading", lambda: {split: load_rows(config.data, split, key="data") for split in config.splits}
    )
    judge = RewardJudge.of(config, rank_device(config, ranks), ranks)
    files, results = {}, {}
    for split, rows in data.items():
        rows = pairs_of_rollouts(rows, f"data, {split}")
        relabelled, results[split] = relabel(rows, judge, f"data, {split}", config.keep_ties)
        counts = results[split]
        if ranks.is_main:
            files[outputs[split]] = json_lines(relabelled)
        logger.info(
            "relabel: %s: %d pairs, %d swapped, %d ties", split, counts["pairs"], counts["swapped"], counts["ties"]
        )
    if ranks.is_main:
        stage.publish_files(files, results)
    return results


def relabel(
    rows: Rows, judge: RewardJudge, key: str, keep_ties: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows with their sides in the order of the judge's scores, and counts; see :func:`run_relabel`.

    Args:
        rows: with `prompt`, `chosen` and `rejected`, as text or as chats.
        judge: gives the scores.
        key: what errors call the rows.
        keep_ties: keep rows with equal scores, as they are.
    """
    prompts, *sides = zip(*RowReader(judge.tokenizer, key, chat=judge.chat).preferences(rows), strict=True)
    scores: list[Sequence[float]] = []
    for side, texts in zip(SIDES, sides, strict=True):
        columns = [{name: value for name, value in row.items() if name != "prompt"} for row in rows]
        ended = [has_ended(row, side, f"{key}: row {number}") for number, row in enumerate(rows, start=1)]
        logger.info("relabel: scoring the %s side of %d pairs", side, len(rows))
        scores.append(judge(prompts, columns, texts, ended, _conversations(rows, side, prompts, texts, judge, key)))
    ties = sum(chosen == rejected for chosen, rejected in zip(*scores, strict=True))
    swapped = sum(chosen < rejected for chosen, rejected in zip(*scores, strict=True))
    written = [
        _relabelled(dict(row), chosen, rejected)
        for row, chosen, rejected in zip(rows, *scores, strict=True)
        if keep_ties or chosen != rejected
    ]
    decided = len(rows) - ties
    agreement = wilson(decided - swapped, decided)._asdict() if decided else None
    margins = [row["chosen_score"] - row["rejected_score"] for row in written]
    counts = {"pairs": len(rows), "ties": ties, "swapped": swapped, "agreement": agreement, "written": len(written)}
    return written, {**counts, "score_margin": sum(margins) / max(1, len(margins))}


def _conversations(
    rows: Rows, side: str, prompts: Sequence[str], texts: Sequence[str], judge: RewardJudge, key: str
) -> dict[str, Any]:
    """What functions get of chats: see :func:`~async_rlhf.data.rendering.conversations`."""
    asked = [asked_of(row, side, f"{key}: row {number}") for number, row in enumerate(rows, 1)]
    if not any(asked):
        return {}
    if judge.tokenizer is None:  # then they are texts that `pairs` has written
        said: list[Message] = [{"role": "assistant", "content": text} for text in texts]
    else:
        renderer = Renderer(judge.tokenizer, (), judge.chat)
        each = zip(rows, texts, prompts, strict=True)
        said = [renderer.of_row(row, key).read(text, prompt) for row, text, prompt in each]
    return as_columns([chat or () for chat in asked], [[message] for message in said])


def _relabelled(row: dict[str, Any], chosen: float, rejected: float) -> dict[str, Any]:
    swap = rejected > chosen
    if swap:
        chosen, rejected = rejected, chosen
        ours = {name: _renamed(name, "chosen", "rejected") for name in row}
        theirs = {name: _renamed(name, "rejected", "chosen") for name in row}
        row = {ours[name] or theirs[name] or name: value for name, value in row.items()}
    return {**row, "chosen_score": chosen, "rejected_score": rejected, "swapped": swap}


def _renamed(name: str, side: str, other: str) -> str | None:
    """The other side's column, for names such as `chosen`, `chosen_by` and `score_chosen`; None for other names."""
    words = name.split("_")
    if words[0] == side:
        return "_".join([other, *words[1:]])
    return "_".join([*words[:-1], other]) if words[-1] == side else None
