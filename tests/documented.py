"""What the pages and the heads of recipes show: commands, what these print, Python; and which of it is not run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("build", "runs") for part in path.relative_to(ROOT).parts)
)
PROGRAMS = (
    "async-rlhf|torchrun|accelerate|sbatch|python|[.]venv/bin/python|make|pip|curl|ray|head|grep|export|for|DRY_RUN"
)
COMMAND = re.compile(rf"(?:\w+\$ +|\$ )?((?:{PROGRAMS})(?= |=).*)")
SHELL = ("", "bash", "sh", "console")


class Shown(NamedTuple):
    """A command of a page, on one line and without its comment, and the lines below it."""

    page: str
    words: str
    told: tuple[str, ...] = ()
    inline: bool = False
    """Within a sentence: it may be a part of a command, and is not run."""


def shown() -> list[Shown]:
    """All commands, in the order of the pages."""
    found = []
    for page in PAGES:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text("utf-8")
        found += _blocks(name, text)
        prose = re.sub(r"^(```.*?^```$|    .*?$)", "", text, flags=re.MULTILINE | re.DOTALL)
        spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
        found += [Shown(name, span, inline=True) for span in spans if COMMAND.fullmatch(span)]
    for path in sorted([*ROOT.glob("recipes/**/*.yml"), *ROOT.glob("recipes/**/*.sh")]):
        text = path.read_text("utf-8").replace("\\\n#", " ")
        lines = re.findall(rf"^#.*?  +((?:\w+\$ +)?(?:{PROGRAMS}) .*?)(?:  +[(].*)?$", text, re.MULTILINE)
        found += [Shown(path.relative_to(ROOT).as_posix(), _plain(COMMAND.fullmatch(line)[1])) for line in lines]
    return found


def _blocks(name: str, text: str) -> list[Shown]:
    found: list[Shown] = []
    fence, told = None, False
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fence, told = (line[3:] if fence is None else None), False
        elif fence in SHELL or (fence is None and line.startswith("    ")):
            line = line if fence is not None else line[4:]
            line = f"async-rlhf train ... {line}" if line.startswith("--") else line
            command = COMMAND.fullmatch(line)
            if command and not _plain(line).endswith(":") and not (told and ": error: " in line):
                found.append(Shown(name, _plain(command[1])))
                told = line.startswith("$ ")
            elif told:
                found[-1] = found[-1]._replace(told=(*found[-1].told, line))
        elif line.strip():
            told = False
    return found


def _plain(command: str) -> str:
    return " ".join(re.sub(r"\s+# .*", "", command).split())


def python() -> dict[str, str]:
    """The Python of the pages, by page and line, or by the name of a file that it begins with."""
    found = {}
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            file = re.match(r'"""(\w+\.py)', block[1])
            found[file[1] if file else f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 1}"] = block[
                1
            ]
    return found


ELSEWHERE = {
    "docs/faq.md ": "tests/unit/test_faq.py",
    "docs/own_data.md ": "tests/contract/test_own_data.py",
    "async-rlhf plan --config": "tests/unit/test_user_pages.py",
    "async-rlhf plan --seconds.generate 0.136": "tests/unit/test_user_pages.py",
    "recipes/tldr/": "tests/unit/test_recipes.py",
    "recipes/gsm8k/": "tests/unit/test_recipes.py",
    "recipes/no_robots/": "tests/unit/test_recipes.py",
    "recipes/reasoning_gym/online_dpo.yml": "tests/unit/test_recipes.py",
    "recipes/science/impulse.py": "tests/contract/test_impulse_recipe.py",
    "recipes/science/drift.py": "tests/contract/test_impulse_recipe.py",
    "recipes/smollm/sums": "tests/unit/test_recipes.py",
    "recipes/smollm/race.py": "tests/unit/test_recipes.py",
    "recipes/smollm/": "tests/smollm/test_smollm.py",
    "--config recipes/ray/": "tests/distributed/test_ray.py",
    "sbatch ": "tests/distributed/test_launch_ranks.py",
    "torchrun ": "tests/distributed/test_launch_ranks.py",
    "accelerate launch ": "tests/distributed/test_launch_ranks.py",
    "--executor ray": "tests/distributed/test_ray_sweep.py",
    "async-rlhf serve ": "tests/vllm/test_server.py",
    "--train.generation.engine vllm": "tests/vllm/test_server.py",
    "--train.push_to_hub": "tests/unit/test_hub.py",
    "async-rlhf workers ": "tests/contract/test_workers.py",
    "recipes/feedback/people.py": "tests/unit/test_recipes.py",
    "--live": "tests/unit/test_report.py",
    "rewards.judge:judge(": "tests/unit/test_judged_rewards.py",
    "rewards.reward_models:": "tests/unit/test_judged_rewards.py",
    "python benchmarks/shared_tokens.py": "tests/benchmarks/test_benchmarks.py",
    "python scripts/science.py": "tests/unit/test_science.py",
    "python -m pytest tests/unit/test_routing.py": "tests/unit/test_routing.py",
    "python -m pytest tests/contract/test_rollouts.py": "tests/contract/test_rollouts.py",
    "python -m venv verifiers": "tests/foreign/conftest.py",
}
"""What other tests run, by the page or a part of the command: with other sizes, or as it stands."""

NOT_RUN = {
    "make ": "installs into the checkout; CI runs most of these targets, people the rest",
    "pip install ": "needs a package registry; make setup and make wheel install",
    "ray start ": "starts a service on this host",
    "ray job ": "needs a cluster with a dashboard",
    "export ": "sets a variable for what follows",
    "async-rlhf sweep recipes/science/": "hours; tests/unit/test_recipes.py reads every setting",
    "async-rlhf certify recipes/": "hours; tests/unit/test_certify.py decides in seconds",
    "async-rlhf COMMAND": "stands for all commands",
}
"""What nothing runs as it stands, and why."""


def is_run(one: Shown) -> bool:
    """Whether make docs-check runs it."""
    return not one.inline and not any(part in f"{one.page} {one.words}" for part in (*ELSEWHERE, *NOT_RUN))
