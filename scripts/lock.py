"""Write constraints-hashes.txt: the pins of constraints.txt that `make setup` installs, each with the hash of its file.

    python scripts/lock.py           # make lock
    pip install --require-hashes --no-deps --requirement constraints-hashes.txt

pip itself finds the files, where it is configured to look, and says their hashes; those of this platform and Python, so
that a lock of another one is written there. torch is left out: which build of it is installed depends on the machine.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS, LOCK = ROOT / "constraints.txt", ROOT / "constraints-hashes.txt"
APART = {"torch"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def base_pins() -> dict[str, str]:
    """Name -> version, of the first part of constraints.txt: the later ones belong to extras."""
    first = PINS.read_text().split("\n# ")[0]
    return dict(line.split("==") for line in first.splitlines() if "==" in line and not line.startswith("#"))


def ask_pip(pins: dict[str, str]) -> dict[str, str]:
    """Canonical name -> SHA-256 of the file that pip would install, without installing it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report)]
        wanted = [f"{name}=={version}" for name, version in pins.items()]
        if (status := subprocess.run([sys.executable, "-m", "pip", *words, *wanted]).returncode) != 0:
            sys.exit(status)
        found = json.loads(report.read_text())["install"]
    hashes = {}
    for one in found:
        name, version = one["metadata"]["name"], one["metadata"]["version"]
        pinned = next(v for n, v in pins.items() if canonical(n) == canonical(name))
        if version != pinned:
            sys.exit(f"{name}: pip found {version}; must be the pinned {pinned}")
        hashes[canonical(name)] = one["download_info"]["archive_info"]["hashes"]["sha256"]
    return hashes


def main() -> None:
    pins = {name: version for name, version in base_pins().items() if name not in APART}
    hashes = ask_pip(pins)
    where = f"{platform.system()} {platform.machine()}, Python {sys.version_info.major}.{sys.version_info.minor}"
    lines = [
        f"# By make lock: what make setup installs, as pinned in constraints.txt, for {where}.",
        "# Without torch, whose build depends on the machine: install it first, from a place that you trust.",
        *(f"{name}=={version} --hash=sha256:{hashes[canonical(name)]}" for name, version in pins.items()),
    ]
    LOCK.write_text("\n".join(lines) + "\n")
    print(f"wrote {LOCK.name}: {len(hashes)} files")


if __name__ == "__main__":
    main()
