"""A real browser without a window: Debian's chromium and chromium-driver, driven by selenium. Without one tests are skipped."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 120.0
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage"
)


class Browser:
    """A page in a browser. ``driver``: selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def look(self, width: int, height: int = 900, scheme: str = "light", mobile: bool = False) -> None:
        """Show the page so wide, in this colour scheme, and as a phone does where ``mobile``."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def value(self, script: str, *arguments: Any) -> Any:
        """The value of an expression of JavaScript."""
        return self.driver.execute_script(f"return {script}", *arguments)

    def text(self) -> str:
        """What is to be read on the page."""
        return str(self.value("document.body.innerText"))

    def wait_for(self, what: str, condition: Callable[[], Any]) -> Any:
        """The condition's value, once it holds; fails with the page's text."""
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, PATIENCE_S, 0.1).until(
            lambda _: condition(), f"no {what}; the page says:\n{self.text()[:3000]}"
        )

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def requested(self) -> set[str]:
        """The addresses of the network that were asked for since the last call."""
        entries = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = {one["params"]["request"]["url"] for one in entries if one["method"] == "Network.requestWillBeSent"}
        return {url for url in sent if url.startswith(("http", "ws", "ftp"))}

    def errors(self) -> list[str]:
        """What the page's script or the content policy complained of since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        import base64

        height = self.value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": self.value("window.innerWidth"), "height": height, "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in ``folder``. Skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    chromium, service = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or service is None:
        pytest.skip("chromium and chromedriver (Debian: chromium, chromium-driver) are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS.split(), f"--user-data-dir={folder / 'browser'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options, Service(service))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
