"""Drives Debian's chromium without a window, through its debugging pipe: no driver and no package is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60  # seconds for any answer; a busy machine is slow
OPTIONS = [
    *(
        "--headless=new",
        "--remote-debugging-pipe",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
    ),
    *("--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--mute-audio", "--disable-features=Translate,OptimizationHints"),
]


class Browser:
    """A running chromium. Messages are JSON, each ended by a zero byte."""

    def __init__(self, send: int, receive: int):
        self._send, self._receive, self._buffer, self._number = send, receive, b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that arrive meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, event: str, session: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not any(one.get("method") == event and one.get("sessionId") == session for one in self.events):
            self.events.append(self._next(deadline, event))

    def _next(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"chromium did not answer {what} within {PATIENCE} seconds"
            part = os.read(self._receive, 1 << 20)
            assert part, "chromium ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Tab:
    """One page. It records messages of the console, errors, and every request."""

    def __init__(self, browser: Browser, *, width: int = 1280, height: int = 900, dark: bool = False):
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> "Tab":
        """Load a page and wait until its charts are drawn."""
        self.call("Page.navigate", url=url)
        self._browser.wait_for("Page.loadEventFired", self._session)
        return self

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression} did not become true"
            time.sleep(0.1)
        return value

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def problems(self) -> list[str]:
        """Messages of the console and errors, which a sound page has none of."""
        found = []
        for event in self._own():
            if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(event["params"])[:400])
        return found

    def requests(self) -> list[str]:
        """The address of every request, the page's own included."""
        return [
            event["params"]["request"]["url"] for event in self._own() if event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path, *, full: bool = True) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        area = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}} if full else {}
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full, **area)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _own(self) -> list[dict[str, Any]]:
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Start chromium, and end it afterwards."""
    assert CHROMIUM is not None
    to_read, to_send = os.pipe()
    received, to_write = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        # chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        start = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", start, "bash", *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Browser(to_send, received)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_send)
            os.close(received)
