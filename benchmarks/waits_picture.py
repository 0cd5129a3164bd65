"""A picture of two runs on the same work: everything in its turn, and nobody waits.

    python benchmarks/waits_picture.py docs/nobody_waits.png [--traces FOLDER]

The real trainer with a generator process, S = 2, on models that wait as on devices of their own (waiting.py). Reward
functions take half of a batch's time, publishing a fifth, and the policy is evaluated every 4 batches. "In turn" scores
and publishes in the learner's thread, and lets the learner sample evaluations, as naive code does. The picture shows
the spans of trace.json; with --traces these files are kept, to be opened on ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from overlap import PROMPT_TOKENS, VOCABULARY, tokenizer
from waiting import waiting_policy
from waits_evaluation import by_the_learner
from waits_publish import copies_that_take
from waits_rewards import PROMPTS, RESPONSE_TOKENS
from waits_rewards import slow_reward as judge

from async_rlhf import GenerationConfig, GRPOConfig, GRPOTrainer
from async_rlhf.scoring.scorer import Scorer

BATCHES, FROM, TO = 14, 5, 12
vars(judge)["by_prompt"] = True
TRACKS = {"generator 0": "generator", "rewards": "rewards", "publisher": "publisher", "learner": "learner"}
COLOURS = {
    "generate": "tab:blue",
    "evaluate": "tab:orange",
    "rewards": "tab:green",
    "score": "tab:green",
    "hand out": "tab:red",
    "publish": "tab:red",
    "annotate": "tab:purple",
    "train": "tab:purple",
}
"""One for each kind of work, wherever it is done."""


def trace(in_turn: bool) -> str:
    """trace.json of one run."""
    words = " ".join(f"w{i}" for i in range(1, PROMPT_TOKENS))
    rows = [{"query": f"w{i + 20} {words}"} for i in range(256)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as naive:
        args = GRPOConfig(
            output_dir=folder,
            overwrite_output_dir=True,
            staleness=2,
            batches=BATCHES,
            samples_per_prompt=2,
            completions_per_batch=2 * PROMPTS,
            per_device_train_batch_size=2 * PROMPTS,
            eval_steps=4,
            non_eos_penalty=False,
            max_prompt_length=PROMPT_TOKENS,
            progress=False,
            num_threads=1,
            generation=GenerationConfig(
                response_length=RESPONSE_TOKENS, mismatch_samples=0, placement="process", num_threads=1
            ),
        )
        naive.enter_context(copies_that_take(0.2, in_publish=in_turn))
        if in_turn:
            naive.enter_context(by_the_learner())
            naive.enter_context(patch.object(Scorer, "begin", lambda *_: None))
        policy = waiting_policy(VOCABULARY, PROMPT_TOKENS + RESPONSE_TOKENS, variation=0.0)
        GRPOTrainer(
            policy, args, rows, reward_funcs=judge, processing_class=tokenizer(), eval_dataset=rows[:PROMPTS]
        ).train()
        return (Path(folder) / "trace.json").read_text()


def spans(text: str) -> list[tuple[str, str, int, float, float]]:
    """Track, name, batch (0 for none), start and end in seconds."""
    events = [json.loads(line.rstrip(",")) for line in text.splitlines()[1:-1]]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [
        (names[e["tid"]], e["name"], e["args"].get("batch", 0), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    ]


def draw(axes: Any, text: str, title: str) -> float:
    """Some batches of one run; returns their seconds."""
    found = spans(text)
    trained = {batch: (start, end) for _, name, batch, start, end in found if name == "train"}
    begin, end = trained[FROM][1], trained[TO][1]
    rows = {track: place for place, track in enumerate(reversed(TRACKS))}
    for track, name, batch, start, stop in found:
        if track in rows and name in COLOURS and stop > begin and start < end:
            start, stop = max(start, begin) - begin, min(stop, end) - begin
            axes.barh(rows[track], stop - start, left=start, height=0.7, color=COLOURS[name], edgecolor="white")
            if batch and stop - start > 0.3 and name != "annotate":
                axes.text((start + stop) / 2, rows[track], str(batch), ha="center", va="center", color="white", size=8)
    axes.set_yticks(list(rows.values()), [TRACKS[track] for track in rows])
    axes.set_title(f"{title}: {(end - begin) / (TO - FROM):.2f} s a batch", loc="left", size=10)
    return end - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--traces", type=Path, help="folder for the two trace.json")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    figure, axes = plt.subplots(2, 1, figsize=(11, 4.6), sharex=True, layout="constrained")
    longest = 0.0
    for place, (title, in_turn) in enumerate({"Everything in its turn": True, "Nobody waits": False}.items()):
        text = trace(in_turn)
        longest = max(longest, draw(axes[place], text, title))
        if options.traces is not None:
            options.traces.mkdir(parents=True, exist_ok=True)
            (options.traces / f"{title.lower().replace(' ', '_')}.json").write_text(text)
    axes[1].set_xlabel(f"seconds from the end of batch {FROM}; a bar's number is its batch")
    axes[1].set_xlim(0, longest)
    kinds = {"sampling": "generate", "evaluation": "evaluate", "rewards": "score"}
    kinds |= {"publishing": "publish", "training": "train"}
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in kinds.values()]
    figure.legend(handles, list(kinds), loc="outside lower center", ncols=len(kinds), frameon=False)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
