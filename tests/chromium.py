"""A real browser for tests: Chromium without a window, driven over two pipes in its DevTools protocol.

Chromium reads messages from its file descriptor 3 and writes to 4: JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
QUIET = ("--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--mute-audio")
PATIENCE = 60.0  # seconds for an answer, on a busy machine

# Of the elements that a selector names, the one whose text differs least from what is behind it.
CONTRASTS = """
((texts) => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const parts = numbers(color).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return numbers(color)[3] === 0 && element.parentElement ? behind(element.parentElement) : color;
  };
  const contrasts = [];
  for (const element of document.querySelectorAll(texts)) {
    const style = getComputedStyle(element);
    const front = element.closest("svg") ? style.fill : style.color;
    const [low, high] = [light(front), light(behind(element))].sort((x, y) => x - y);
    contrasts.push([(high + 0.05) / (low + 0.05), element.tagName + " " + element.className]);
  }
  return contrasts.sort((x, y) => x[0] - y[0])[0];
})(%s)
"""


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def required() -> str:
    """Where Chromium is. Without it, a test is left out, or fails where it is said to be there."""
    path = executable()
    if path is None:
        if os.environ.get("PENSTOCK_REQUIRE_CHROMIUM"):
            pytest.fail("PENSTOCK_REQUIRE_CHROMIUM is set, and there is no Chromium on this machine")
        pytest.skip("there is no Chromium")
    return path


class Browser:
    """One tab. What goes wrong in its pages is in `problems`, what they ask of the network in `requests`."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="penstock-chromium-")
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The numbers 3 and 4 may be taken in this process, so that a shell moves them to their places.
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        data = f"--user-data-dir={self._profile}"
        command = ["bash", "-c", script, "bash", path, *FLAGS, *QUIET, data, "--remote-debugging-pipe"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdin=quiet, stdout=quiet, stderr=quiet
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._session: str | None = None
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]  # type: ignore[no-any-return]
            self._note(answer)

    def wait_for(self, event: str) -> None:
        """Wait until the browser tells of something, unless it did since the last wait."""
        while not any(known["method"] == event for known in self.events):
            self._note(self._receive())
        self.events.clear()

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            left = end - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._from], [], [], left)[0]:
                more = os.read(self._from, 1 << 16)
                assert more, "the browser has ended"
                self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def _note(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        about = event.get("params", {})
        match event["method"]:
            case "Runtime.exceptionThrown":
                self.problems.append(str(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(
                    f"{about['type']}: {[argument.get('value') for argument in about['args']]}"
                )
            case "Log.entryAdded":
                self.problems.append(str(about["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])

    # What a person does

    def open(self, page: Path | str, fragment: str = "") -> None:
        """Open a file, or an address."""
        address = page if isinstance(page, str) else page.resolve().as_uri()
        # Through an empty page, as another fragment of the same page would not reload it.
        for url in ("about:blank", address + fragment):
            self.events.clear()
            self.call("Page.navigate", url=url)
            self.wait_for("Page.loadEventFired")

    def view(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        scale = 2 if phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def scripts(self, on: bool) -> None:
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def offline(self) -> None:
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def least_contrast(self, texts: str) -> tuple[float, str]:
        """The least contrast of the elements that a selector names, and which element has it."""
        contrast, where = self.ask(CONTRASTS % json.dumps(texts))
        return contrast, where

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element, which is scrolled into view."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{where}.scrollIntoView({{block: 'center', inline: 'nearest'}})")
        box = self.ask(
            f"(() => {{ const b = {where}.getBoundingClientRect(); return [b.x, b.y, b.width, b.height] }})()"
        )
        return box[0] + box[2] / 2, box[1] + box[3] / 2

    def click(self, selector: str) -> None:
        x, y = self.place(selector)
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, **(text if kind == "keyDown" else {})
            )

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """The whole page, as long as it is."""
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))
