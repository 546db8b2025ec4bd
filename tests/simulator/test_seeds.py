"""Many virtual clusters, those that once failed, and the command line that runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowdp.machine.async_rounds import AsyncRounds
from tests.simulator import __main__ as command_line
from tests.simulator.cluster import JudgedWorld
from tests.simulator.faults import draw
from tests.simulator.lives import play

SEEDS = 300
CORPUS = json.loads((Path(__file__).parent / "corpus/seeds.json").read_text())


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 50):
        play(draw(seed))


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: str(case["seed"]))
def test_corpus(case: dict[str, object]) -> None:
    """Runs that once broke a rule; `found` says what they found."""
    seed = case["seed"]
    assert isinstance(seed, int)
    assert case["found"]
    play(draw(seed))


@pytest.mark.parametrize("seed", [0, 7, 8, 12, 17, 19, 28, 38, 59, 223, 499, 3185])
def test_same_seed_same_event_log(seed: int) -> None:
    first, second = JudgedWorld(draw(seed)), JudgedWorld(draw(seed))
    first.run()
    second.run()
    assert first.facts == second.facts
    assert first.clock.now_ms == second.clock.now_ms
    other = JudgedWorld(replace(draw(seed), seed=seed + 1))
    other.run()
    assert other.facts != first.facts


@pytest.mark.parametrize("first", range(8, 2000, 500))
def test_seeds_of_unknown_length(first: int) -> None:
    for seed in range(first, first + 500, 10):
        play(draw(seed))


@pytest.mark.parametrize("first", range(8, 4400, 1100))
def test_seeds_of_windows(first: int) -> None:
    for seed in range(first, first + 1100, 11):
        play(draw(seed))


@pytest.mark.parametrize("first", range(7, 5200, 1300))
def test_seeds_of_steps_of_several_batches(first: int) -> None:
    for seed in range(first, first + 1300, 13):
        play(draw(seed))


@pytest.mark.parametrize("first", [1, 8, 12])
def test_seeds_of_several_lives(first: int) -> None:
    for seed in range(first, 3000, 15):
        play(draw(seed))


@pytest.mark.parametrize("first", [10, 14])
def test_seeds_of_several_machines(first: int) -> None:
    for seed in range(first, 2500, 17):
        play(draw(seed))


# ---------------------------------------------------------------- python -m tests.simulator
def test_seeds_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--seeds", "5", "--from", "10"]) == 0
    said = capsys.readouterr().out
    assert "5 runs" in said
    assert "runs/s" in said
    assert "0 failures" in said


def test_a_failing_seed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncRounds, "_is_dirty", False)
    assert command_line.main(["--seeds", "20"]) == 1
    said = capsys.readouterr().out
    assert "seed 9: S2: " in said
    assert "    python -m tests.simulator --seed 9 --trace" in said
    assert command_line.main(["--seed", "9"]) == 1
    assert "seed 9: S2: " in capsys.readouterr().out


def test_another_exception_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: AsyncRounds, now_ms: float) -> None:
        raise KeyError("rank")

    monkeypatch.setattr(AsyncRounds, "_open_round", broken)
    assert command_line.main(["--seeds", "20"]) == 1
    assert "KeyError: 'rank'" in capsys.readouterr().out


def test_a_trace_has_a_line_for_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--seed", "17", "--trace"]) == 0
    *trace, last = capsys.readouterr().out.splitlines()
    world = JudgedWorld(draw(17))
    world.run()
    facts = [line for line in trace if " ms  -> " in line]
    steps = [line for line in trace if " trained batch " in line]
    assert len(facts) == len(world.facts)
    assert len(steps) == sum(world.rules.steps)
    assert last.startswith("seed 17: every rule holds; ")
    assert float(trace[0].split(" ms ")[0]) >= 0.0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--seeds", "0"], "is no number of at least 1"),
        (["--seed", "1", "--seeds", "2"], "not allowed with"),
        ([], "is required"),
    ],
)
def test_wrong_arguments(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command_line.main(arguments)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


def test_several_processes() -> None:
    command = [sys.executable, "-m", "tests.simulator", "--seeds", "60", "--jobs", "2"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert child.returncode == 0, child.stderr
    assert "60 runs" in child.stdout
