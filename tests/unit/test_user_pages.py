"""The plans on the pages for users are what plan prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from async_rlhf.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "users").glob("*.md")), ids=lambda page: page.stem)
def test_a_plan_is_as_the_page_says(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    words, told = re.search(r"^    \$ async-rlhf (plan .*)\n((?:    .*\n|\n)+)", page.read_text("utf-8"), re.M).groups()
    with pytest.raises(SystemExit):
        main(words.split())
    said = [line.strip() for line in capsys.readouterr().out.strip().splitlines()]
    assert [line.strip() for line in told.strip().splitlines()] == said
