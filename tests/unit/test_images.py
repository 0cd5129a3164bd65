"""Images install what the Makefile installs, in the versions that it pins, on a Python that is tested."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
MAKE = (ROOT / "Makefile").read_text("utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_image_has_pinned_versions(path):
    text = re.sub(r"^#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE)
    (python,) = re.findall(r"^FROM python:(3\.\d+)-slim", text, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in (ROOT / "pyproject.toml").read_text("utf-8")
    targets = re.findall(r"\bmake ([a-z][\w-]*)", text)
    assert "setup" in targets
    assert all(f"\n{target}:" in MAKE for target in targets)
    assert text.count("pip install") == text.count("pip install --constraint constraints.txt")
    assert "VENV ?=" in MAKE  # so that the image's variable says where


def test_the_development_container_is_one_of_them():
    folder = ROOT / ".devcontainer"
    build = json.loads((folder / "devcontainer.json").read_text("utf-8"))["build"]
    assert (folder / build["dockerfile"]).resolve() in FILES
    assert (folder / build["context"]).resolve() == ROOT
