"""Tests of `python -m flowdp.sim`."""

from __future__ import annotations

import pytest

from flowdp.sim import __main__ as command_line


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--plan", "12,28", "--sync", "9", "--policy", "async"]) == 0
    assert "async: " in capsys.readouterr().out
    assert command_line.main(["--plan", "12,0"]) == 2
    assert "speeds must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"), [(["--plan", "fast"], "is no list of numbers"), ([], "are required")]
)
def test_wrong_arguments(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command_line.main(arguments)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err
