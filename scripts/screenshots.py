"""Pictures of pages: a report in the light on a desk, and in the dark on a phone; what asks people.

    python scripts/screenshots.py runs/quickstart/report.html docs/commands
    python scripts/screenshots.py 'http://127.0.0.1:8642/?token=TOKEN' docs/commands   # of async-rlhf feedback RUN

Needs Chromium. It writes report_light.png and report_dark_phone.png, or feedback.png.
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


def ask(url: str, folder: Path) -> None:
    """Take the one of a question."""
    with browser() as shown:
        shown.call("Emulation.setDeviceMetricsOverride", width=900, height=420, deviceScaleFactor=1, mobile=False)
        shown.call("Page.navigate", url=url)
        shown.wait_for("document.getElementById('who')?.hidden === false")
        shown.run("document.getElementById('name').value = 'ada'; document.querySelector('#who button').click()")
        shown.wait_for("!document.getElementById('question').hidden")
        shown.screenshot(folder / "feedback.png")


if __name__ == "__main__":
    place, out = sys.argv[1], Path(sys.argv[2])
    ask(place, out) if place.startswith("http") else main(Path(place), out)
