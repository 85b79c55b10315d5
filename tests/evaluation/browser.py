"""A headless Chromium over its own debugging pipe: no driver, no port, no network.

`Browser.open` shows a page in a width and a colour scheme, and keeps what the browser complained
about and what it asked for. `setup_sandbox.sh --browser` installs it; without one tests fail.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

DEADLINE_S = 60.0
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--hide-scrollbars", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip


class Browser:
    """One process; a page at a time. A context manager."""

    def __init__(self, profile: Path):
        found = shutil.which("chromium") or shutil.which("chromium-browser")
        if found is None:
            raise RuntimeError(
                "there is no chromium; run ./setup_sandbox.sh --browser as root, or "
                "leave these tests out with -m 'not browser'"
            )
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = (found, f"--user-data-dir={profile}", *OPTIONS)
        self._process = subprocess.Popen(
            ("bash", "-c", command, "bash", *arguments),
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def __enter__(self):
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):
            self._session = ""
            self("Browser.close")
        os.close(self._write)
        os.close(self._read)
        self._process.wait(DEADLINE_S)

    def __call__(self, method: str, **parameters):
        """Sends a command and returns its result; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._keep(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self):
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            read = os.read(self._read, 2**20)
            if not read or time.monotonic() > deadline:
                raise RuntimeError(f"the browser ended or is silent; status {self._process.poll()}")
            self._buffer += read
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _keep(self, event):
        told = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told))
            case "Log.entryAdded":
                self.complaints.append(told["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True

    def open(self, page: Path, *, width: int, scheme: str) -> None:
        """Shows a page and waits until it is there."""
        self.complaints.clear()
        self.requests.clear()
        self._loaded = False
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
             mobile=width < 600)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self("Emulation.setEmulatedMedia", features=[feature])
        self("Page.navigate", url=page.as_uri())
        while not self._loaded:
            self._keep(self._next())

    def value(self, expression: str):
        """What a JavaScript expression says in the page."""
        told = self("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression[:80]}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page."""
        size = self("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))
