"""Two pictures of a report: in the light on a desk, in the dark on a phone.

    python scripts/screenshots.py runs/quickstart/report.html docs/commands

Needs Chromium. It writes report_light.png and report_dark_phone.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from browser import browser


def main(page: Path, folder: Path) -> None:
    """Take them."""
    with browser() as shown:
        shown.open(page, 1200, 1250)
        shown.go_to("warnings")
        shown.screenshot(folder / "report_light.png")
        shown.open(page, 390, 1250, dark=True)
        shown.go_to("curves")
        shown.screenshot(folder / "report_dark_phone.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
