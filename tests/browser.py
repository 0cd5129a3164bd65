"""Chromium without a screen, over its DevTools protocol: a page of a given size, what it says, and its picture."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60.0


def chromium() -> str:
    """The program; the test is skipped where there is none."""
    pytest.importorskip("websockets")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on PATH: apt-get install chromium")
    return found


class Browser:
    """One page of a browser."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []
        """What the console has as errors, and what it was refused."""
        self.requests: list[str] = []
        """What it asked for, after Network.enable."""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv(timeout=SECONDS))
            if told.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["params"]))
            elif told.get("method") == "Runtime.consoleAPICalled" and told["params"]["type"] in ("error", "warning"):
                self.errors.append(json.dumps(told["params"]["args"]))
            elif told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(told["params"]["entry"]["text"])
            elif told.get("method") == "Network.requestWillBeSent":
                self.requests.append(told["params"]["request"]["url"])
            elif told.get("id") == number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return dict(told.get("result", {}))

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(str(told["exceptionDetails"]))
        return told["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until an expression is true, also of a page that loads itself again meanwhile."""
        deadline = time.monotonic() + SECONDS
        while not self._is_true(script):
            if time.monotonic() > deadline:
                raise TimeoutError(script)
            time.sleep(0.05)

    def _is_true(self, script: str) -> bool:
        try:
            return bool(self.run(script))
        except RuntimeError as error:
            gone = ("Inspected target navigated", "Cannot find default execution context", "context was destroyed")
            if not any(told in str(error) for told in gone):
                raise
            return False  # the page that was asked is gone

    def open(self, page: Path, width: int, height: int, dark: bool = False) -> None:
        """Show a file in a window of that size, and wait until its charts are drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=page.absolute().as_uri())
        self.wait_for("document.readyState === 'complete' && document.documentElement?.dataset.drawn === 'yes'")

    def go_to(self, name: str) -> None:
        """Move to an element, as a link to it does."""
        self.run(f"document.getElementById({name!r}).scrollIntoView()")

    def screenshot(self, path: Path) -> None:
        """A PNG of what the window shows."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with one empty page; it ends with the body."""
    program = chromium()
    from websockets.sync.client import connect

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_address(Path(folder), process), max_size=None, open_timeout=SECONDS) as socket:
                page = Browser(socket)
                target = page.call("Target.createTarget", url="about:blank")["targetId"]
            place = _address(Path(folder), process).split("/devtools/")[0]
            with connect(f"{place}/devtools/page/{target}", max_size=None, open_timeout=SECONDS) as socket:
                page = Browser(socket)
                for domain in ("Page", "Runtime", "Log"):
                    page.call(f"{domain}.enable")
                yield page
        finally:
            process.terminate()
            process.wait(timeout=SECONDS)


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Where it listens, as it writes into its folder."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        lines = (
            (folder / "DevToolsActivePort").read_text().splitlines() if (folder / "DevToolsActivePort").exists() else []
        )
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    pytest.skip("Chromium does not start here")
