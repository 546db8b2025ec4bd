"""Chromium for tests and pictures: the system's own program, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["PATIENCE_MS", "WatchedPage", "chromium_program", "open_browser", "open_page"]

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

PATIENCE_MS = 120_000.0
"""Time that ends only a test that hangs."""


def chromium_program() -> str | None:
    """Path of the program; None where none is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def open_browser(program: str) -> Iterator[Browser]:
    """Run Chromium without a window, and end it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE_MS
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class WatchedPage:
    """A page, and all that it asks for and complains of.

    Attributes:
        page: The page of playwright.
        requests: Addresses that it asked for.
        complaints: Warnings and errors of its console, errors of its scripts, and its dialogs.
    """

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None,
        )
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))


@contextmanager
def open_page(
    browser: Browser,
    width: int = 1280,
    height: int = 900,
    theme: Literal["light", "dark"] = "light",
    scale: float = 1.0,
) -> Iterator[WatchedPage]:
    """Open an empty page in a context of its own; `scale`: pixels of the screen for one of the page."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=scale
    )
    context.set_default_timeout(PATIENCE_MS)
    try:
        yield WatchedPage(context.new_page())
    finally:
        context.close()
