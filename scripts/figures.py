"""Draws the figures of the documentation, readable in light and dark: docs/figures/*.svg.

python scripts/figures.py     # a test compares them, byte for byte
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from async_rlhf.run.schedule import version_for

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
WIDTH = 860
STYLE = """<style>
text{font:13px sans-serif;fill:#1f2328}.small{font-size:11px}.title{font-weight:bold}.middle{text-anchor:middle}
.page{fill:#fff}.idle{fill:#eaecef}.sample{fill:#b6dcfe}.train{fill:#fbd8a5}.plain{fill:#f3f4f6}rect{stroke:#8b949e}
.page,.idle{stroke:none}path{stroke:#57606a;fill:none;marker-end:url(#tip)}.tip{fill:#57606a}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}.idle{fill:#1c2129}.sample{fill:#174a7c}
.train{fill:#7a4a10}.plain{fill:#21262d}path{stroke:#9ea7b1}.tip{fill:#9ea7b1}}
</style>"""
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path class="tip" style="stroke:none;marker-end:none" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'


def box(x: float, y: float, width: float, height: float, kind: str, *lines: str) -> str:
    """A rectangle with lines in its middle, the first of them in bold."""
    middle, top = x + width / 2, y + height / 2 - 8 * len(lines) + 13
    said = [text(middle, top + 16 * i, line, f"middle {'small' if i else 'title'}") for i, line in enumerate(lines)]
    return "\n".join([rect(x, y, width, height, kind), *said])


def arrow(*points: tuple[float, float]) -> str:
    return f'<path d="M{"L".join(f"{x:g} {y:g}" for x, y in points)}"/>'


def schedule(batches: int = 6, step: float = 58, left: float = 130) -> Iterator[str]:
    """Who samples what with which weights: a batch takes as long to sample as to train on."""
    for staleness in (0, 1, 2):
        y, sampled, trained = 14 + 118 * staleness, [0], [0]
        for batch in range(1, batches + 1):
            weights = version_for(batch, staleness)
            sampled.append(max(sampled[-1], trained[weights]) + 1)
            trained.append(max(trained[-1], sampled[-1]) + 1)
        yield text(14, y + 14, f"S = {staleness}", "title")
        for row, (name, kind, ends) in enumerate((("generator", "sample", sampled), ("learner", "train", trained))):
            top = y + 20 + 40 * row
            yield text(52, top + 21, name)
            yield rect(left, top, step * trained[-1], 34, "idle")
            for batch, end in enumerate(ends[1:], 1):
                said = f"by v{version_for(batch, staleness)}" if row == 0 else f"makes v{batch}"
                yield box(left + step * (end - 1), top, step, 34, kind, f"batch {batch}", said)
    yield text(14, 376, "v: the weights after so many batches. Grey: waiting. S = 1 already keeps both busy;", "small")
    yield text(14, 392, "S = 2 lets the generator be one more batch ahead, which helps where times differ.", "small")


def loop() -> Iterator[str]:
    """What goes where, and which folder does it."""
    top, low = 30, 190
    for x, y, kind, name, place in (
        (14, top, "plain", "prompts", "data/"),
        (190, top, "plain", "schedule", "run/schedule.py"),
        (414, top, "sample", "generators", "generation/"),
        (706, top, "plain", "scorer", "rewards/"),
        (706, low, "train", "learner", "learner/, algorithms/"),
        (414, low, "plain", "published weights", "models/publish.py"),
        (190, low, "plain", "log, evaluate, save", "run/, commands/"),
    ):
        yield box(x, y, 140, 50, kind, name, place)
    for start, end, y, *words in (
        (154, 190, top),
        (330, 414, top, "batch b,", "version"),
        (554, 706, top, "completions,", "log-probabilities, versions"),
        (706, 554, low, "policy"),
    ):
        yield arrow((start, y + 25), (end, y + 25))
        for i, word in enumerate(words):
            yield text((start + end) / 2, y + 20 + 20 * i, word, "middle small")
    yield arrow((776, top + 50), (776, low))
    yield text(784, 138, "scores", "small")
    yield arrow((484, low), (484, top + 50))
    yield text(492, 138, "S + 1 versions", "small")
    yield arrow((440, low), (440, 140), (260, 140), (260, top + 50))
    yield text(268, 132, "version v allows batch v + 1 + S", "small")
    yield arrow((776, low + 50), (776, 270), (260, 270), (260, low + 50))
    yield text(492, 264, "after each batch", "small")


def sample() -> Iterator[str]:
    """What is known of a sample at each place."""
    for i, (kind, place, name, *lines) in enumerate(
        (
            ("plain", "data/", "prompt", "its draw, tokens", "and columns"),
            ("sample", "generation/", "K samples", "each token with its", "log-probability", "and version"),
            ("plain", "rewards/", "scores", "reward model,", "functions, penalties"),
            ("train", "learner/", "experience", "log-probabilities of", "reference and policy,", "advantages"),
            ("train", "algorithms/", "loss", "on sampled tokens,", "corrected for", "stale weights"),
            ("train", "models/", "version b", "published for", "batch b + 1 + S"),
        )
    ):
        x = 14 + 142 * i
        yield box(x, 16, 122, 84, kind, name, *lines)
        yield text(x + 61, 118, place, "middle small")
        if i:
            yield arrow((x - 20, 58), (x, 58))


WAY = {
    "collect": ("plain", "run/loop schedule", "generation/remote dispatch process protocol", "data/stream"),
    "check": ("sample", "generation/audit sampling sampling_test"),
    "score": ("plain", "rewards/scorer prefetch", "data/tokenizer"),
    "annotate": (
        "train",
        "learner/learner",
        "models/rows passes packing forward head",
        "distributed/parallel collectives",
    ),
    "credit, update": ("train", "algorithms/grpo policy estimators", "config/policy"),
    "publish": ("sample", "models/publish"),
    "log": ("plain", "run/callbacks warnings", "system/trace files lock signals", "config/sizes"),
}
"""Of one batch: each step's colour, and the files of each room that it enters first. All know types.py."""


def way() -> Iterator[str]:
    """The way of one batch through the learner's main thread: each file that it enters, where it enters it first."""
    for row, (step, (kind, *rooms)) in enumerate(WAY.items()):
        y = 14 + 62 * row
        yield box(14, y, 130, 46, kind, step)
        for i, room in enumerate(rooms):
            name, _, files = room.partition("/")
            lines = files.split()
            half = (len(lines) + 1) // 2
            shown = [", ".join(lines)] if len(lines) < 4 else [", ".join(lines[:half]) + ",", ", ".join(lines[half:])]
            yield box(170 + 232 * i, y, 220, 46 if len(shown) == 1 else 54, "plain", f"{name}/", *shown)
        if row:
            yield arrow((79, y - 16), (79, y))


FIGURES = {"schedule": (schedule, 404), "loop": (loop, 284), "sample": (sample, 130), "way": (way, 456)}


def drawn() -> Iterator[tuple[str, str]]:
    """Each figure's file, and what is in it."""
    for name, (draw, height) in FIGURES.items():
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        title = f"<title>{escape((draw.__doc__ or '').rstrip('.'))}</title>"
        page = f'<rect width="{WIDTH}" height="{height}" class="page"/>'
        yield f"{name}.svg", "\n".join([head, title, STYLE, TIP, page, *draw(), "</svg>", ""])


if __name__ == "__main__":
    for file, content in drawn():
        (FOLDER / file).write_text(content, encoding="utf-8")
