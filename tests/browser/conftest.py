"""A browser for the tests of a module; they skip where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.chromium import chromium_program, open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for one module: playwright's event loop would stand in the way of other tests."""
    pytest.importorskip("playwright", reason="needs playwright: pip install 'flowdp[browser]'")
    program = chromium_program()
    if program is None:
        pytest.skip("needs Chromium: Debian's package chromium, or Google Chrome")
    with open_browser(program) as browser:
        yield browser
