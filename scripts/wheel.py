"""Builds the sdist and the wheel, checks what is in them, and tries the wheel alone in an empty folder.

    python scripts/wheel.py

The environment of the trial sees this one's packages, all but async_rlhf: the wheel's own comes first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def say(*words: str | Path, folder: Path = ROOT) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, cwd=folder, env=clean, check=True, text=True, stdout=subprocess.PIPE).stdout


def wrong_with(names: set[str], recipes: set[str]) -> list[str]:
    """What the names of a wheel's or an sdist's files lack, and what should not be there."""
    needed = {"async_rlhf/py.typed", "async_rlhf/run/card.md", *(f"async_rlhf/recipes/{name}" for name in recipes)}
    return [f"lacks {name}" for name in sorted(needed - names)] + [
        f"has {name}" for name in sorted(names) if "__pycache__" in name or "test" in name.split("/")[0]
    ]


def main() -> None:
    for old in (DIST, ROOT / "build", ROOT / "async_rlhf.egg-info"):  # files of an earlier build would come along
        shutil.rmtree(old, ignore_errors=True)
    say(sys.executable, "-m", "build", "--no-isolation")
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    say(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    recipes = set(say("git", "ls-files", folder=ROOT / "recipes").split())
    with zipfile.ZipFile(wheel) as file, tarfile.open(sdist) as tar:
        inside = {wheel: set(file.namelist()), sdist: {name.partition("/")[2] for name in tar.getnames()}}
    inside[sdist] = {name for name in inside[sdist] if not name.startswith("tests")}  # setuptools adds some
    if wrong := [f"{path.name} {what}" for path, names in inside.items() for what in wrong_with(names, recipes)]:
        sys.exit("\n".join(wrong))
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(empty)
        say(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        say(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
        site = Path(say(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        place = say(python, "-c", "import async_rlhf; print(async_rlhf.__file__)", folder=folder)
        if not place.startswith(str(site)):
            sys.exit(f"the trial imported {place}")
        command = folder / "venv" / "bin" / "async-rlhf"
        if set(say(command, "recipes", folder=folder).split()) != recipes:
            sys.exit("async-rlhf recipes does not list the recipes")
        say(command, "quickstart", "--scale", "0.01", "--out", "quickstart", folder=folder)
        made = {path.name for path in (folder / "quickstart").iterdir()}
        if missing := {"report.html", "summary.json", "training.png"} - made:
            sys.exit(f"async-rlhf quickstart did not make {', '.join(sorted(missing))}")
        # As the messages and pages say: extras of what is installed take no index that has async-rlhf.
        say(sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--no-index", "async-rlhf[report]")
    print(f"{wheel.name} and {sdist.name} are whole; the wheel works alone")


if __name__ == "__main__":
    main()
