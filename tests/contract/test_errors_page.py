"""docs/errors.md shows what is really printed, of every error."""

from __future__ import annotations

import logging

import pytest

from flowdp import errors
from tests.docs.errors_page import EXAMPLES, PAGE, missing, named, output, same

TEXT = PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_what_is_shown_is_what_is_printed(name: str) -> None:
    printed = output(name)
    assert same(named(TEXT)[name], printed), (
        f"docs/errors.md is out of date; python -m tests.docs.errors_page --write. Now printed:\n{printed}"
    )


def test_every_output_has_a_name_and_an_example() -> None:
    assert missing(TEXT) == []
    assert named(TEXT).keys() == EXAMPLES.keys()
    assert TEXT.count("<!-- output:") == len(EXAMPLES)


def test_every_error_is_explained() -> None:
    headings = [line for line in TEXT.splitlines() if line.startswith("## ")]
    for name in errors.__all__:
        assert name == "DeviceError" or any(name in line for line in headings), name
        assert f"`{name}`" in TEXT, name


def test_nothing_is_left_of_an_example() -> None:
    log = logging.getLogger("flowdp")
    before = (log.handlers[:], log.propagate)
    output("option-error")
    assert (log.handlers, log.propagate) == before
