"""Builds the sdist and the wheel, checks what is in them, and tries the wheel alone in an empty folder.

    python scripts/wheel.py

The wheel is built from the sdist. The environment of its trial has the packages that the wheel's metadata asks for, and
what those ask for, by links to this one's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def say(*words: str | Path, folder: Path = ROOT) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, cwd=folder, env=clean, check=True, text=True, stdout=subprocess.PIPE).stdout


def wrong_with(names: set[str], recipes: set[str]) -> list[str]:
    """What the names of a wheel's or an sdist's files lack, and what should not be there."""
    data = ("py.typed", "run/card.md", "compat/original/keys.yml", "tasks/docstrings/words.yml")
    needed = {f"async_rlhf/{name}" for name in (*data, *(f"recipes/{name}" for name in recipes))}
    return [f"lacks {name}" for name in sorted(needed - names)] + [
        f"has {name}" for name in sorted(names) if "__pycache__" in name or "test" in name.split("/")[0]
    ]


def asked_for(
    one: Distribution, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]
) -> Iterator[Distribution]:
    """What a distribution with some extras asks for, and what that asks for, but what was seen."""
    for need in map(Requirement, one.requires or []):
        further = canonicalize_name(need.name), frozenset(need.extras)
        asks = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if asks and further not in seen:
            seen.add(further)
            yield (found := distribution(need.name))
            yield from asked_for(found, further[1], seen)


def link(found: Iterable[Distribution], site: Path) -> None:
    """Put links to the files of distributions into the packages of another environment."""
    for one in found:
        for top in {file.parts[0] for file in one.files or []} - {"..", "__pycache__"}:
            if not os.path.lexists(site / top):
                (site / top).symlink_to(Path(str(one.locate_file(top))))


def main() -> None:
    for old in (DIST, ROOT / "build", ROOT / "async_rlhf.egg-info"):  # files of an earlier build would come along
        shutil.rmtree(old, ignore_errors=True)
    say(sys.executable, "-m", "build", "--no-isolation")
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    say(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    recipes = set(say("git", "ls-files", folder=ROOT / "recipes").split())
    with zipfile.ZipFile(wheel) as file, tarfile.open(sdist) as tar:
        inside = {wheel: set(file.namelist()), sdist: {name.partition("/")[2] for name in tar.getnames()}}
    if wrong := [f"{path.name} {what}" for path, names in inside.items() for what in wrong_with(names, recipes)]:
        sys.exit("\n".join(wrong))
    with tempfile.TemporaryDirectory() as empty:
        folder = Path(empty)
        say(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        python = folder / "venv" / "bin" / "python"
        say(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel)
        site = Path(say(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (ours,) = distributions(name="async_rlhf", path=[str(site)])
        link(asked_for(ours, frozenset(), set()), site)
        place = say(python, "-c", "import async_rlhf; print(async_rlhf.__file__)", folder=folder)
        if not place.startswith(str(site)):
            sys.exit(f"the trial imported {place}")
        command = folder / "venv" / "bin" / "async-rlhf"
        if {line.split()[0] for line in say(command, "recipes", folder=folder).splitlines()} != recipes:
            sys.exit("async-rlhf recipes does not list the recipes")
        quickstart = [command, "quickstart", "--scale", "0.01", "--out", "quickstart"]
        for extra, made in (("", {"summary.json"}), ("report", {"summary.json", "report.html", "training.png"})):
            link(asked_for(ours, frozenset([extra]), set()), site)
            say(*quickstart, folder=folder)  # the second time only its end
            if made != {path.name for path in (folder / "quickstart").iterdir() if path.is_file()}:
                sys.exit(f"async-rlhf quickstart with the extra {extra!r} did not make {made}")
        # As the messages and pages say: extras of what is installed take no index that has async-rlhf.
        say(sys.executable, "-m", "pip", "--python", python, "install", "--dry-run", "--no-index", "async-rlhf[report]")
    print(f"{wheel.name} and {sdist.name} are whole; the wheel works alone")


if __name__ == "__main__":
    main()
