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
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import waits
import workload
from smallest import parse
from waits_evaluation import by_the_learner
from waits_publish import copies_that_take
from waits_rewards import PROMPTS, RESPONSE_TOKENS, REWARD_SECONDS, slow_reward

from async_rlhf.rewards.scorer import Scorer
from async_rlhf.studies.report.charts import Axis, Spec, figure, render_png, timeline

FROM = 5
"""The batch whose end is the picture's left edge."""
TRACKS = {"generator 0": "generator", "rewards": "rewards", "publisher": "publisher", "learner": "learner"}
WORK = {
    "generate": "sampling",
    "evaluate": "evaluation",
    "rewards": "rewards",
    "score": "rewards",
    "hand out": "publishing",
    "publish": "publishing",
    "annotate": "training",
    "train": "training",
}
"""What each span is, wherever it is done: a colour of the timeline."""


def trace(in_turn: bool, batches: int, prompts: int, seconds: float) -> str:
    """trace.json of one run. A batch is ``prompts``, its rewards take ``seconds``."""
    judge, size = slow_reward(seconds), 2 * prompts
    vars(judge)["by_prompt"] = True
    options = {
        **{"staleness": 2, "batches": batches, "samples_per_prompt": 2, "completions_per_batch": size},
        **{"per_device_train_batch_size": size, "eval_steps": 4},
    }
    with ExitStack() as naive:
        naive.enter_context(copies_that_take(0.4 * seconds, in_publish=in_turn))
        if in_turn:
            naive.enter_context(by_the_learner())
            naive.enter_context(patch.object(Scorer, "begin", lambda *_: None))
        held = workload.prompts()[:prompts]
        return waits.waiting_run("grpo", RESPONSE_TOKENS, options, judge, eval_dataset=held).trace


def spans(text: str) -> list[tuple[str, str, int, float, float]]:
    """Track, name, batch (0 for none), start and end in seconds."""
    events = [json.loads(line.rstrip(",")) for line in text.splitlines()[1:-1]]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [
        (names[e["tid"]], e["name"], e["args"].get("batch", 0), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    ]


def bars(text: str, last: int) -> tuple[list[dict[str, Any]], float]:
    """The batches of one run up to ``last``, and their seconds."""
    found = spans(text)
    trained = {batch: (start, end) for _, name, batch, start, end in found if name == "train"}
    begin, end = trained[FROM][1], trained[last][1]
    rows = []
    for track, name, batch, start, stop in found:
        if track in TRACKS and name in WORK and stop > begin and start < end:
            start, stop = max(start, begin) - begin, min(stop, end) - begin
            number = str(batch) if batch and name != "annotate" else ""
            row = {"track": TRACKS[track], "work": WORK[name], "what": name, "start": start, "end": stop}
            rows.append({**row, "text": number})
    return rows, end - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--traces", type=Path, help="folder for the two trace.json")
    parser.add_argument("--batches", type=int, default=14)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--reward-seconds", type=float, default=REWARD_SECONDS)
    options = parse(parser, batches=8, prompts=2, reward_seconds=0.02)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    shown, last = {}, options.batches - 2
    for title, in_turn in {"Everything in its turn": True, "Nobody waits": False}.items():
        text = trace(in_turn, options.batches, options.prompts, options.reward_seconds)
        shown[title] = bars(text, last)
        if options.traces is not None:
            options.traces.mkdir(parents=True, exist_ok=True)
            (options.traces / f"{title.lower().replace(' ', '_')}.json").write_text(text)
    longest = max(seconds for _, seconds in shown.values())
    x = Axis("start", f"seconds from the end of batch {FROM}; a bar's number is its batch", domain=(0, longest))
    panels: list[Spec] = [
        timeline(rows, list(TRACKS.values()), x, longest)
        | {"title": f"{title}: {seconds / (last - FROM):.2f} s a batch", "width": 900}
        for title, (rows, seconds) in shown.items()
    ]
    render_png(figure(panels, columns=1), options.out, scale=1.3)


if __name__ == "__main__":
    main()
