"""Tests of `python -m flowdp.sim`: replays and predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowdp.machine.config import CoordinatorConfig
from flowdp.machine.event_log import EventLog
from flowdp.sim import __main__ as command_line
from tests.simulator.cluster import JudgedWorld
from tests.simulator.scenario import Scenario

SCENARIO = Scenario(
    seed=0, config=CoordinatorConfig(world_size=2, batches=40, epochs=2), ms_per_step=(1.0, 2.0)
)


def log_of(world: JudgedWorld) -> list[str]:
    """The lines that a run with a sink would have written."""
    lines: list[str] = []
    machine = type(world.coordinator)(world.scenario.config)
    event_log = EventLog(machine, lines.append)
    for now_ms, fact in world.facts:
        event_log.take(fact, now_ms, machine.handle(fact, now_ms))
    return lines


def test_replay_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = JudgedWorld(SCENARIO)
    world.run()
    lines = log_of(world)
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    whole.write_text("".join(lines))
    torn.write_text("".join(lines[:3]) + lines[3][:20])
    assert command_line.main(["--replay", str(whole)]) == 0
    assert (
        f"{len(world.facts):,} facts give the same commands; then the run is done" in capsys.readouterr().out
    )
    assert command_line.main(["--replay", str(torn)]) == 1
    assert "line 4: not a line of an event log" in capsys.readouterr().out
    assert command_line.main(["--replay", str(tmp_path / "gone")]) == 2
    assert "cannot read the event log" in capsys.readouterr().err


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--plan", "12,28", "--sync", "9", "--policy", "async"]) == 0
    assert "async: " in capsys.readouterr().out
    assert command_line.main(["--plan", "12,0"]) == 2
    assert "speeds must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--plan", "fast"], "is no list of numbers"),
        (["--plan", "1,2", "--replay", "run.jsonl"], "not allowed with"),
        ([], "is required"),
    ],
)
def test_wrong_arguments(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command_line.main(arguments)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err
