from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.peers.cases import SIDES, Marks, all_taken, measure, read_marks, throughput


def steps(count: int, every_s: float, samples: int, begin: float = 0.0) -> list[tuple[float, int]]:
    return [(begin + step * every_s, samples) for step in range(count)]


def test_equal_devices_make_the_sum_of_their_rates() -> None:
    marks: Marks = {("a", 0): steps(41, 0.1, 64), ("b", 0): steps(41, 0.1, 64, begin=0.03)}
    assert throughput(marks) == pytest.approx(2 * 640)


def test_a_device_of_another_speed_counts_by_its_own_steps() -> None:
    marks: Marks = {("a", 0): steps(101, 0.1, 64), ("a", 1): steps(41, 0.25, 64)}
    assert throughput(marks) == pytest.approx(640 + 256)


def test_the_warm_up_is_left_out() -> None:
    slow_at_first = steps(10, 1.0, 10) + steps(31, 0.1, 10, begin=10.0)
    assert throughput({("a", 0): slow_at_first}) == pytest.approx(100, rel=1e-6)


def test_a_device_that_is_idle_in_the_end_does_not_end_the_measurement() -> None:
    marks: Marks = {("a", 0): steps(101, 0.1, 64), ("a", 1): steps(11, 0.1, 64)}
    assert throughput(marks) == pytest.approx(640)


def test_marks_are_read_by_process_and_thread(tmp_path: Path) -> None:
    (tmp_path / "marks-1.json").write_text(json.dumps([[7, 0.0, 4], [8, 0.5, 4], [7, 1.0, 4], [8, 1.5, 4]]))
    (tmp_path / "marks-2.json").write_text(json.dumps([[7, 0.0, 4], [7, 1.0, 4], [9, 1.0, 4]]))
    marks = read_marks(tmp_path)
    assert {owner: len(times) for owner, times in marks.items()} == {
        ("marks-1.json", 7): 2,
        ("marks-1.json", 8): 2,
        ("marks-2.json", 7): 2,
    }


def test_a_run_counts_when_every_device_has_taken_all_its_steps() -> None:
    marks: Marks = {("a", 0): steps(40, 0.1, 64), ("b", 0): steps(41, 0.1, 64)}
    assert all_taken(marks, 2, 40)
    assert not all_taken(marks, 2, 41)
    assert not all_taken(marks, 3, 40)


@pytest.mark.linux
@pytest.mark.parametrize("name", ["hand", "ddp", "setup", "exact", "cadence"])
def test_a_side_trains_in_processes_of_its_own(name: str) -> None:
    kind = "one" if name == "hand" else "equal"
    measured = measure(0, kind, "mlp", name, part=0.04)
    assert measured.rate > 0
    assert measured.first_step_s > 0


@pytest.mark.linux
@pytest.mark.parametrize("name", ["ddp", "setup", "exact", "cadence"])
def test_an_exception_on_device_1_is_shown_and_ends_the_program(name: str) -> None:
    measured = measure(0, "failure", "mlp", name)
    assert measured.shown_s is not None
    assert measured.exit_s is not None
    assert measured.peak_mb > 0


def test_each_side_is_a_program() -> None:
    folder = Path(__file__).resolve().parents[3] / "bench/peers/sides"
    assert {side.module for side in SIDES.values()} == {path.stem for path in folder.glob("[!_]*.py")}
