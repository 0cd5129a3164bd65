"""The evaluation as plain text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 160
"""Columns where there is no terminal."""


def format_table(results: Mapping[str, Any], width: int = WIDTH) -> str:
    """Tables with one line per model, 95% intervals in brackets: first overall, then against each opponent.

    Args:
        results: what :func:`~async_rlhf.commands.evaluate.run_evaluate` returns.
        width: columns of the terminal; wider headers and cells are broken into lines.
    """
    titles = [f"{results['prompts']} held-out prompts, 95% intervals", "", ""]
    tables = [
        _table(title, *filled(columns, results["models"], results["reference_response"] if human else None), width)
        for title, (columns, human) in zip(titles, columns_of(results), strict=True)
    ]
    return "\n".join([*filter(None, tables), *results.get("notes", ())])


def of_today(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results with the keys of today, where an older version wrote gold_mean and gold_difference_vs_*."""
    human, *models = (
        figures and {re.sub("^gold_", "reward_", key): value for key, value in figures.items()}
        for figures in (results["reference_response"], *results["models"].values())
    )
    return {**results, "reference_response": human, "models": dict(zip(results["models"], models, strict=True))}


def columns_of(results: Mapping[str, Any]) -> list[tuple[dict[str, str], bool]]:
    """For each table its columns, head -> key of a model's results, and whether the human responses have a row."""
    reference, name = results["reference"], results.get("reward", "reward")
    overall = {
        name: "reward_mean",
        f"KL to {reference} (nats)": "kl_to_reference",
        "perplexity of human text": "perplexity",
        "perplexity under reference": "perplexity_under_reference",
        "turns": "mean_turns",
        "tokens": "mean_length",
        "ended": "ended_share",
    }
    against = [
        {
            f"wins against {title}": f"win_rate_vs_{opponent}",
            f"{name.partition(' ')[0]} difference": f"reward_difference_vs_{opponent}",
            "at equal length": f"length_controlled_win_rate_vs_{opponent}",
            "ties": f"ties_vs_{opponent}",
            "contradictory": f"inconsistent_vs_{opponent}",
            "unreadable": f"unreadable_vs_{opponent}",
        }
        for title, opponent in (("human responses", "reference_response"), (reference, reference))
    ]
    return [(overall, True), *((columns, False) for columns in against)]


def filled(
    columns: Mapping[str, str], models: Mapping[str, Mapping[str, Any]], human: Mapping[str, Any] | None
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of a table: the columns that any model has, and the models that have any of them, then the human
    responses if given. No rows if there is no such model.
    """
    having = {name: figures for name, figures in models.items() if any(key in figures for key in columns.values())}
    shown = {head: key for head, key in columns.items() if any(key in figures for figures in having.values())}
    if having and human is not None:
        having["(human)"] = human
    rows = [[name, *(cell(key, figures.get(key)) for key in shown.values())] for name, figures in having.items()]
    return ["model", *shown], rows


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    if not rows:
        return ""
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="left" if head == heads[0] else "right")
    for row in rows:
        table.add_row(*row)
    return rendered(table, width)


def side_by_side(samples: Sequence[Mapping[str, Any]], n: int) -> str:
    """The first ``n`` prompts, each with every answer and its score.

    Args:
        samples: the rows of samples.jsonl.
        n: how many.
    """
    blocks = []
    for sample in samples[:n]:
        answers = {name: (answer["completion"], answer["score"]) for name, answer in sample["models"].items()}
        if sample["reference_response"] is not None:
            answers = {"(human)": (sample["reference_response"], sample["reference_score"]), **answers}
        width = max(map(len, answers))
        lines = [f"{name:<{width}}  {_score(score)}  {text!r}" for name, (text, score) in answers.items()]
        blocks.append("\n".join([str(sample["query"]).rstrip(), *lines]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _score(value: float | None) -> str:
    return f"{value:7.3f}" if value is not None else " " * 7  # a pairwise judge gives none


def cell(key: str, value: Any) -> str:
    """A number as tables show it, an interval in brackets; "" for none."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        low, middle, high = (round(value[name], 3) + 0.0 for name in ("low", "estimate", "high"))  # no -0.000
        if "win_rate" in key:
            return f"{middle:.1%} [{low:.1%}, {high:.1%}]"
        return f"{middle:.3f} [{low:.3f}, {high:.3f}]"
    share = key.startswith(("ended_share", "ties_", "inconsistent_", "unreadable_"))
    return f"{value:.1%}" if share else f"{value:.2f}"


def rendered(table: Table, width: int) -> str:
    """A table as plain text, of at most so many columns."""
    console = Console(width=width, no_color=True, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
