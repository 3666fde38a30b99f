"""Headless Chromium, as a person would look at a page."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from support.processes.stretch import BOUND_S

_ARGUMENTS = (
    # Root may not use the sandbox; the rest keeps it from calling home.
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def needs_chromium() -> str:
    """Its path. Skips a test on a machine without it; fails it in CI, which has it."""
    found = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is missing: the status page can't be looked at")
        pytest.skip("chromium isn't installed: `make tools`")
    return found


class Browser:
    """Pages of one browser, and what went wrong in them."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        """Errors and warnings of the console, and requests to elsewhere."""
        page.on("console", self._log_message)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._asked(request.url))

    def _log_message(self, message: object) -> None:
        if getattr(message, "type", "") in ("error", "warning"):
            self.complaints.append(str(getattr(message, "text", message)))

    def _asked(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "http://localhost:")):
            self.complaints.append(f"asked for {url}")


@contextmanager
def browsing(width: int = 1280, height: int = 860) -> Iterator[Browser]:
    """A browser with one page, until the context ends."""
    path = needs_chromium()
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        try:
            page = chromium.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(1000 * BOUND_S)
            expect.set_options(timeout=1000 * BOUND_S)
            yield Browser(page)
        finally:
            chromium.close()
