"""Rated sentences for docs/own_data.md: ``python tests/rated_sentences.py ratings.jsonl [how many]``."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

DISHES = ["soup", "bread", "fish", "rice", "cake", "salad", "pasta", "tea", "pie", "stew", "curry", "cheese"]
DISHES += ["beans", "eggs", "juice", "jam"]
PLACES = ["harbour", "station", "market", "corner", "garden", "castle", "river", "museum", "bridge", "mill"]
PLACES += ["tower", "lake"]
WORDS = {
    **dict.fromkeys(["superb", "fresh", "tender", "friendly", "generous", "lovely"], 1.0),
    **dict.fromkeys(["warm", "quick", "simple", "plain", "small", "usual"], 0.0),
    **dict.fromkeys(["stale", "cold", "bland", "rude", "greasy", "dull"], -1.0),
}
"""What each word adds to a rating."""
ENDINGS = {"I will come back": 1.0, "I may come back": 0.0, "I will not come back": -1.0}


def rating(text: str) -> float:
    """What a sentence deserves: 3, and what its words and its ending add; from 0 to 6."""
    words = sum(value for word, value in WORDS.items() if f" {word}" in text)
    return 3 + words + sum(value for ending, value in ENDINGS.items() if ending in text)


def sentences(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Rows of `text` and `score`, a rating with an error of half a point."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        first, second = draw.sample(list(WORDS), 2)
        place = f"The {draw.choice(DISHES)} at the {draw.choice(PLACES)} café was {first} and {second}"
        text = f"{place}; {draw.choice(list(ENDINGS))}."
        rows.append({"text": text, "score": round(rating(text) + draw.gauss(0, 0.5), 1)})
    return rows


def write(path: Path, count: int) -> None:
    """Write them as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in sentences(count)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
