"""The documentation speaks of what there is: every command has its page, every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import async_rlhf
from async_rlhf.algorithms.table import BUILT_IN
from async_rlhf.commands.table import COMMANDS, function_of, import_attribute
from async_rlhf.config.parsing import options_of
from async_rlhf.run.config import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "runs" for part in path.relative_to(ROOT).parts)
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_has_a_page_in_the_index():
    index = (ROOT / "docs" / "commands" / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert callable(function_of(name))
        page = ROOT / "docs" / "commands" / f"{name}.md"
        assert page.read_text(encoding="utf-8").startswith(f"# `{name}`"), name
        assert f"({name}.md)" in index, name
    pages = {path.stem for path in (ROOT / "docs" / "commands").glob("*.md")}
    assert pages == {*COMMANDS, "README"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_the_site_is_built_so_that_warnings_end_it():
    """With --quiet no warning is counted, so --strict finds no anchor that leads nowhere."""
    assert "mkdocs build --strict\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "most"), [("README.md", 120), ("docs/architecture.md", 200)])
def test_first_pages_are_short(page, most):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_options_in_the_examples_exist():
    """Every ``--key`` that follows ``async-rlhf COMMAND`` in a page is one of that command."""
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            found = re.match(r"\s*(?:\$ )?async-rlhf (\w+) (.*)", line)
            if found is None or found.group(1) not in COMMANDS:
                continue
            known = OPTIONS.get(found.group(1)) or OPTIONS.setdefault(found.group(1), names_of(found.group(1)))
            for option in re.findall(r"(?<=\s)--([\w.]+)", found.group(2).partition("#")[0]):
                if option not in known and option.split(".")[0] not in ("models", "vllm"):
                    wrong.append(f"{page.relative_to(ROOT)}: async-rlhf {found.group(1)} --{option}")
    assert not wrong


OPTIONS: dict[str, set[str]] = {}
SHORT = {"config", "dry", "resume", "resume-from", "reward", "help", "command", "output"}


def names_of(command: str) -> set[str]:
    """What its parser knows, of every algorithm: keys, groups, and short forms."""
    kind = import_attribute(COMMANDS[command].config)
    kinds = [RunConfig.of(algorithm) for algorithm in BUILT_IN] if kind is RunConfig else [kind]
    keys = {option.key for kind in kinds for option in options_of(kind)}
    groups = {key[:at] for key in keys for at, sign in enumerate(key) if sign == "."}
    return keys | groups | SHORT | {"env", "help-all", "dry-run"}


def test_the_version_is_one():
    """The wheel takes the package's; what cites it names the same."""
    assert f"\nversion: {async_rlhf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
