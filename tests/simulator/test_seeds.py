"""Many virtual clusters, those that once failed, and the command line that runs them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowdp.machine.async_rounds import AsyncRounds
from tests.simulator import __main__ as command_line
from tests.simulator.cluster import JudgedWorld
from tests.simulator.faults import draw
from tests.simulator.lives import play

CORPUS = json.loads((Path(__file__).parent / "corpus/seeds.json").read_text())


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(150), id="first"),
        pytest.param(range(150, 300), id="next"),
        pytest.param(range(8, 1000, 10), id="unknown length"),
        pytest.param(range(8, 2200, 11), id="windows"),
        pytest.param(range(7, 2600, 13), id="steps of several batches"),
        pytest.param(range(1, 1500, 15), id="lives"),
        pytest.param(range(8, 1500, 15), id="other lives"),
        pytest.param(range(12, 1500, 15), id="more lives"),
        pytest.param(range(10, 1300, 17), id="machines"),
        pytest.param(range(14, 700, 34), id="other machines"),
    ],
)
def test_seeds(seeds: range) -> None:
    for seed in seeds:
        play(draw(seed))


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: str(case["seed"]))
def test_corpus(case: dict[str, object]) -> None:
    """Runs that once broke a rule; `found` says what they found."""
    seed = case["seed"]
    assert isinstance(seed, int)
    assert case["found"]
    play(draw(seed))


@pytest.mark.parametrize("seed", [0, 7, 8, 12, 17, 19, 28, 223])
def test_same_seed_same_event_log(seed: int) -> None:
    first, second = JudgedWorld(draw(seed)), JudgedWorld(draw(seed))
    first.run()
    second.run()
    assert first.facts == second.facts
    assert first.clock.now_ms == second.clock.now_ms
    other = JudgedWorld(replace(draw(seed), seed=seed + 1))
    other.run()
    assert other.facts != first.facts


# ---------------------------------------------------------------- python -m tests.simulator


def test_a_failing_seed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncRounds, "_is_dirty", False)
    assert command_line.main(["--seeds", "20"]) == 1
    said = capsys.readouterr().out
    assert "seed 9: S2: " in said
    assert "    python -m tests.simulator --seed 9 --trace" in said
    assert command_line.main(["--seed", "9"]) == 1
    assert "seed 9: S2: " in capsys.readouterr().out


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
