from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.cases import SIDES, Marks, measure, throughput


def steps(count: int, every_s: float, samples: int, begin: float = 0.0) -> list[tuple[float, int]]:
    return [(begin + step * every_s, samples) for step in range(count)]


def test_a_device_of_another_speed_counts_by_its_own_steps() -> None:
    marks: Marks = {("a", 0): steps(101, 0.1, 64), ("a", 1): steps(41, 0.25, 64)}
    assert throughput(marks) == pytest.approx(640 + 256)


def test_the_warm_up_is_left_out() -> None:
    slow_at_first = steps(10, 1.0, 10) + steps(31, 0.1, 10, begin=10.0)
    assert throughput({("a", 0): slow_at_first}) == pytest.approx(100, rel=1e-6)


@pytest.mark.linux
@pytest.mark.parametrize("name", ["setup", "exact"])
def test_a_side_trains_in_processes_of_its_own(name: str) -> None:
    measured = measure(0, "equal", "mlp", name, part=0.04)
    assert measured.rate > 0
    assert measured.first_step_s > 0


@pytest.mark.linux
def test_an_exception_on_device_1_is_shown_and_ends_the_program() -> None:
    measured = measure(0, "failure", "mlp", "exact")
    assert measured.shown_s is not None
    assert measured.exit_s is not None
    assert measured.peak_mb > 0


def test_each_side_is_a_program() -> None:
    folder = Path(__file__).resolve().parents[3] / "bench/peers/sides"
    assert {side.module for side in SIDES.values()} == {path.stem for path in folder.glob("[!_]*.py")}
