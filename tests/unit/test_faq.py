"""The errors of docs/faq.md are what the commands print."""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer, new_policy

from async_rlhf.cli import main
from async_rlhf.models.saving import write_model

PAGE = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^    \$ async-rlhf (.*)\n    (.*)$", PAGE, re.MULTILINE)


CHAT = '{"query": [{"role": "user", "content": "1 + 1"}]}'
REWARD = """def score(prompts, completions, **columns):
    return [len(each) / columns["lenght"] for each in completions]
"""


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faq") / "tiny"
    write_model(new_policy(), byte_tokenizer(), folder)
    return folder


@pytest.mark.parametrize(("words", "error"), EXAMPLES)
def test_an_error_is_as_the_page_says(words, error, tiny, tmp_path, monkeypatch, capsys):
    if "cuda:9" in words and torch.cuda.is_available():
        pytest.skip("the error counts the GPUs of this host")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "tiny").symlink_to(tiny)
    for name, text in {"rows.jsonl": '{"question": "1 + 1"}', "chats.jsonl": CHAT, "rewards.py": REWARD}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    if "output_dir full" in words:
        monkeypatch.setattr(os, "write", no_room)  # who holds the lock is written first
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(words))
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("async-rlhf ")]
    assert [line.replace(f"({tmp_path}/", "(") for line in told] == [error]
    assert ended.value.code == (1 if " raised " in error else 2)


def test_the_page_has_examples():
    assert len(EXAMPLES) == PAGE.count("$ async-rlhf") > 0
