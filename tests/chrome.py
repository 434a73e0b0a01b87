"""Chromium without a window, driven over chromedriver's own HTTP protocol (W3C WebDriver): nothing to install for it.

with Chrome(folder) as browser:
    browser.open("http://127.0.0.1:7860/")
    browser.run("return document.title")
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVERS = ("chromedriver", "chromium.chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-proxy-server",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element


def missing() -> str:
    """Why there can be no browser here; empty where there can."""
    for what, names in (("browser", BROWSERS), ("driver", DRIVERS)):
        if not any(map(shutil.which, names)):
            return f"no {what} ({' or '.join(names)}): apt-get install chromium chromium-driver"
    return ""


class Chrome:
    """One browser with an empty profile in `folder`; it ends with the block."""

    def __init__(self, folder: Path) -> None:
        binary, driver = (next(filter(None, map(shutil.which, names))) for names in (BROWSERS, DRIVERS))
        self._log = (folder / "chromedriver.log").open("w+")
        self._process = subprocess.Popen([driver, "--port=0"], stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self._root = f"http://127.0.0.1:{self._port(folder / 'chromedriver.log')}"
            flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}"]
            options = {"args": flags, "binary": binary}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Chrome:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if hasattr(self, "_session"):
            self._ask("DELETE", self._session)
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    # -- what a test does
    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def window(self, width: int, height: int, dark: bool = False) -> None:
        """Any size, also narrower than a window can be, and what the reader prefers."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def find(self, selector: str) -> dict[str, str]:
        found: dict[str, str] = self._ask(
            "POST", f"{self._session}/element", {"using": "css selector", "value": selector}
        )
        return found

    def click(self, selector: str) -> None:
        self._ask("POST", f"{self._session}/element/{self.find(selector)[ELEMENT]}/click", {})

    def keys(self, selector: str, text: str) -> None:
        """Type into an element; into a file input, the path of a file."""
        self._ask("POST", f"{self._session}/element/{self.find(selector)[ELEMENT]}/value", {"text": text})

    def wait(self, condition: str, seconds: float = 120) -> Any:
        """Until the JavaScript expression is true; its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"return {condition}")):
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s: {condition}; the page says {self.text('main')[:2000]}")
            time.sleep(0.1)
        return value

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def screenshot(self, path: Path) -> Path:
        """The whole page, not only what the window shows."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def complaints(self) -> list[str]:
        """What the browser's console says of errors: scripts that raised, refused resources."""
        entries = self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    # -- the protocol
    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=180) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            value = json.load(error)["value"]
            raise AssertionError(f"{path}: {value['error']}: {value['message'].splitlines()[0]}") from None

    def _port(self, log: Path) -> int:
        end = time.monotonic() + 60
        while time.monotonic() < end and self._process.poll() is None:
            for line in log.read_text().splitlines():
                if "was started successfully on port" in line:
                    return int(line.rstrip(".").split()[-1])
            time.sleep(0.1)
        raise AssertionError(f"chromedriver did not start: {log.read_text()[-500:]}")
