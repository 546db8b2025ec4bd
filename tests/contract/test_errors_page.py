"""docs/errors.md shows what is really printed, of every error."""

from __future__ import annotations

import logging

import pytest

from flowdp import errors
from tests.docs import errors_page
from tests.docs.errors_page import EXAMPLES, PAGE, missing, named, output, rewritten, same, shortened

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


def test_a_changed_message_is_seen_and_written() -> None:
    page = "# Page\n\n<!-- output: one -->\n```text\nstep 7: the\nfile is gone\n```\n\n```bash\nls\n```\n"
    assert named(page) == {"one": "step 7: the\nfile is gone\n"}
    assert same("step 7: the\nfile is gone\n", "step 1,204.5: the file\n    is gone\n")
    assert not same("step 7: the\nfile is gone\n", "step 7: the file was gone\n")
    assert rewritten(page, {"one": "step 8: the file is gone\n"}) == page
    assert named(rewritten(page, {"one": "step 8: a file is gone\n"})) == {"one": "step 8: a file is gone\n"}
    assert missing(page) == []
    assert missing(page.replace("<!-- output: one -->\n", "")) == ["```text"]


def test_what_is_left_out() -> None:
    told = "\n".join(
        [
            "Traceback (most recent call last):",
            '  File "flowdp/trainer/run.py", line 3, in join',
            "    raise error",
            "    ^^^^^^^^^^^",
            f'  File "{errors_page.__file__}", line 5, in loss',
            "    raise ValueError(word)",
            "          ^^^^^^^^^^^^^^^^",
            "ValueError: " + "much " * 30,
            "The last events:",
            "  0.3 ms WorkerReady(rank=0) => -",
        ]
    )
    lines = shortened(told).splitlines()
    assert lines[:5] == [
        "Traceback (most recent call last):",
        "  ...",
        '  File "train.py", line 5, in loss',
        "    raise ValueError(word)",
        "ValueError: " + "much " * 16 + "much",
    ]
    assert lines[6:] == ["The last events:", "  ..."]


def test_nothing_is_left_of_an_example() -> None:
    log = logging.getLogger("flowdp")
    before = (log.handlers[:], log.propagate)
    output("option-error")
    assert (log.handlers, log.propagate) == before
