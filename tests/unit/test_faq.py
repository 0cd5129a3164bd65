"""The errors of docs/faq.md are what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from async_rlhf.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^    \$ async-rlhf (.*)\n    (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("words", "error"), EXAMPLES)
def test_an_error_is_as_the_page_says(words, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1"}', encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    assert (ended.value.code, capsys.readouterr().err.strip()) == (2, error)


def test_the_page_has_examples():
    assert len(EXAMPLES) == PAGE.count("$ async-rlhf") > 0
