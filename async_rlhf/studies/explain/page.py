"""The account of an update as a page of text: page.txt, with what it takes to fill it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from async_rlhf.studies.templates import filled

WIDTH = 110
SHOWN, TOKENS = 20, 10
"""How many completions, or pairs, and tokens are listed."""
_SHARE = 0.1
"""A token is marked if it adds at least this share of what its completion's tokens add in size."""


def page(account: Mapping[str, Any]) -> str:
    """The page, for :func:`~async_rlhf.studies.explain.explanation.explained` and what the command knows of the run."""
    text = filled(
        "explain",
        {**account, "SHOWN": SHOWN, "TOKENS": TOKENS},
        "sample.txt" if "sample" in account else "page.txt",
        share=lambda x: "-" if x is None else f"{x:.1%}",
        decimal=lambda x: "-" if x is None else f"{x:.4g}",
        cosine=lambda x: "-" if x is None else f"{x:.3f}",
        **{"facts": _facts, "marked": _marked, "visible": _visible, "short": _short, "wrapped": _wrapped},
    )
    return text + "\n"


def _facts(row: Mapping[str, Any]) -> str:
    """Of a completion: its score, and how likely it has become."""
    parts = ", ".join(f"{name} {value:.3f}" for name, value in row["rewards"].items() if value is not None)
    facts = [f"score {row['score']:.3f}" + (f" ({parts})" if len(row["rewards"]) > 1 else "")]
    facts += [] if row["advantage"] is None else [f"advantage {row['advantage']:+.3f}"]
    facts += ["cut off"] if row["finish_reason"] == "length" else []
    change = row["more_likely_by"]
    return ", ".join([*facts, f"{'more' if change >= 0 else 'less'} likely by {abs(change):.2g} nats than without"])


def _marked(tokens: Sequence[Mapping[str, Any]]) -> str:
    """The completion, with its most influential tokens in marks."""
    whole = sum(abs(token["contribution"]) for token in tokens)
    return "".join(
        f"«{token['text']}»" if whole and abs(token["contribution"]) >= _SHARE * whole else token["text"]
        for token in tokens
    )


def _visible(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _short(text: str, width: int, last: bool = False) -> str:
    text = _visible(text)
    if len(text) <= width:
        return text
    return f"...{text[len(text) - width + 3 :]}" if last else f"{text[: width - 3]}..."


def _wrapped(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, max(len(line), 1), WIDTH - 8):
            yield line[start : start + WIDTH - 8]
