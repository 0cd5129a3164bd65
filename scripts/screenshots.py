"""Pictures of pages: a report in the light on a desk, and in the dark on a phone; the site.

    python scripts/screenshots.py runs/quickstart/report.html docs/commands
    python scripts/screenshots.py site /tmp   # of make site

Needs Chromium. It writes report_light.png and report_dark_phone.png, or the site's first page, wide and narrow, in the
light and in the dark: site_1280_light.png and so on.
"""

from __future__ import annotations

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from browser import browser


def main(page: Path, folder: Path) -> None:
    """Take them."""
    with browser() as shown:
        shown.open(page, 1200, 1250)
        shown.go_to("staleness")
        shown.screenshot(folder / "report_light.png")
        shown.open(page, 390, 1250, dark=True)
        shown.run("document.querySelector('nav a[href=\"#score-against-kl\"]').click()")  # which unfolds it, too
        shown.go_to("score-against-kl")
        shown.screenshot(folder / "report_dark_phone.png")


def first_page(site: Path, folder: Path) -> None:
    """Take those of the site, which has no search without a server; a browser that is new has chosen no colours."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=site))
    Thread(target=server.serve_forever, daemon=True).start()
    for width in (1280, 390):
        for scheme, name in (("light", "default"), ("dark", "slate")):
            with browser() as shown:
                size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700}
                shown.call("Emulation.setDeviceMetricsOverride", **size)
                shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
                shown.call("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
                shown.wait_for(
                    f"document.readyState === 'complete' && document.body.dataset.mdColorScheme === '{name}'"
                )
                shown.wait_for("document.getAnimations().length === 0")
                shown.screenshot(folder / f"site_{width}_{scheme}.png")


if __name__ == "__main__":
    place, out = sys.argv[1], Path(sys.argv[2])
    (first_page if Path(place).is_dir() else main)(Path(place), out)
