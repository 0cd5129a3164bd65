"""What pages show of plans is what plan prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rlhf.cli import main

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"^    \$ async-rlhf (plan .*)\n((?:    .*\n|\n(?=    (?!\$)))+)", re.MULTILINE)
EXAMPLES = {
    f"{page.stem}: {found[1]}": (found[1], found[2])
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for found in SHOWN.finditer(page.read_text("utf-8"))
}


@pytest.mark.parametrize(("words", "told"), EXAMPLES.values(), ids=EXAMPLES)
def test_a_plan_is_as_the_page_says(words, told, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    words, _, sought = words.partition(" | grep ")
    with pytest.raises(SystemExit):
        main(words.split())
    said = [line.strip() for line in "".join(capsys.readouterr()).strip().splitlines() if sought in line]
    assert [line.strip() for line in told.strip().splitlines()] == said


def test_every_page_for_users_shows_one():
    pages = {page.stem for page in (ROOT / "docs" / "users").glob("*.md")}
    assert pages == pages & {name.partition(":")[0] for name in EXAMPLES} != set()
    assert len(EXAMPLES) == sum(
        page.read_text("utf-8").count("$ async-rlhf plan") for page in (ROOT / "docs").rglob("*.md")
    )
