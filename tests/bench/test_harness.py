from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness import Comparison, compare, machine, report, table


def test_pairs_are_complete_and_in_both_orders() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> float:
        order.append(name)
        return value

    result = compare("x", {"A": lambda: side("a", 3.0), "B": lambda: side("b", 2.0)}, pairs=20)
    pairs = ["".join(order[i : i + 2]) for i in range(0, 40, 2)]
    assert set(pairs) == {"ab", "ba"}
    assert (result.a, result.b, result.names) == ((3.0,) * 20, (2.0,) * 20, ("A", "B"))
    assert (result.ratio, result.interval, result.medians) == (1.5, (1.5, 1.5), (3.0, 2.0))


def test_a_slow_spell_of_the_machine_leaves_the_ratio() -> None:
    a = (2.0, 2.0, 2.0, 20.0, 20.0, 20.0, 20.0)
    b = tuple(value / 2 for value in a)
    assert Comparison("x", "ms", ("a", "b"), a, b).ratio == 2.0


def test_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Comparison("small CNN", "ms", ("default", "tuned"), (3.0, 3.1), (2.0, 2.1))
    assert report("made", [result], folder=tmp_path) is None
    assert list(tmp_path.iterdir()) == []

    path = report("made", [result], figures={"faults": 2_400.0}, save=True, folder=tmp_path)
    assert path is not None
    record = json.loads(path.read_text())
    assert path.name == f"made_{record['date']}_{record['commit']}.json"
    assert record["machine"] == machine()
    assert record["figures"] == {"faults": 2_400.0}
    assert record["results"][0]["a"] == [3.0, 3.1]
    assert record["results"][0]["ratio"] == pytest.approx(result.ratio)
    out = capsys.readouterr().out
    assert "faults  2,400.000" in out
    assert table([result]) in out
