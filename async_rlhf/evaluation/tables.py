"""The evaluation as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def format_table(results: Mapping[str, Any]) -> str:
    """One line per model, with 95% intervals in brackets.

    Args:
        results: what :func:`~async_rlhf.evaluation.evaluate.run_evaluate` returns.
    """
    reference = results["reference"]
    columns = {"gold reward": "gold_mean"}
    for title, opponent in (("human", "reference_response"), (reference, reference)):
        columns |= {
            f"wins vs. {title}": f"win_rate_vs_{opponent}",
            f"at equal length vs. {title}": f"length_controlled_win_rate_vs_{opponent}",
            f"ties vs. {title}": f"ties_vs_{opponent}",
        }
    columns |= {
        f"KL to {reference} (nats)": "kl_to_reference",
        "perplexity": "perplexity",
        "under reference": "perplexity_under_reference",
        "tokens": "mean_length",
        "ended": "ended_share",
    }
    shown = {title: key for title, key in columns.items() if any(key in one for one in results["models"].values())}
    table = Table(title=f"{results['prompts']} held-out prompts, 95% intervals")
    table.add_column("model")
    for title in shown:
        table.add_column(title, justify="right")
    for name, one in results["models"].items():
        table.add_row(name, *(_cell(key, one.get(key)) for key in shown.values()))
    human = results["reference_response"]
    if human is not None:
        table.add_row("(human)", *(_cell(key, human.get(key)) for key in shown.values()))
    return _render(table)


def side_by_side(samples: Sequence[Mapping[str, Any]], n: int) -> str:
    """The first ``n`` prompts, each with every answer and its score.

    Args:
        samples: the rows of samples.jsonl.
        n: how many.
    """
    blocks = []
    for sample in samples[:n]:
        answers = {name: (one["completion"], one["score"]) for name, one in sample["models"].items()}
        if sample["reference_response"] is not None:
            answers = {"(human)": (sample["reference_response"], sample["reference_score"]), **answers}
        width = max(map(len, answers))
        lines = [f"{name:<{width}}  {_score(score)}  {text!r}" for name, (text, score) in answers.items()]
        blocks.append("\n".join([str(sample["query"]).rstrip(), *lines]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _score(value: float | None) -> str:
    return f"{value:7.3f}" if value is not None else " " * 7  # a judge that compares gives none


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if "win_rate" in key:
            return f"{value['estimate']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"
        return f"{value['estimate']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return f"{value:.1%}" if key == "ended_share" or key.startswith("ties") else f"{value:.2f}"


def _render(table: Table) -> str:
    console = Console(width=300, no_color=True, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(table, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
