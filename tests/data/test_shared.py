"""Tests of turns: sources whose datasets may share an object read in turns, and no others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flowdp.data import shared
from flowdp.data.shared import ReadingTurns, reachable

WAIT_S = 60.0


class Rows(Dataset[Any]):
    def __init__(self, file: object) -> None:
        self.file = file

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index


class Slotted:
    __slots__ = ("file",)

    def __init__(self, file: object) -> None:
        self.file = file


def meets(one: object, other: object) -> bool:
    mine, others = reachable(one), reachable(other)
    assert mine is not None
    assert others is not None
    return not mine.isdisjoint(others)


class TestReachable:
    def test_the_parts_of_a_split(self) -> None:
        rows = Rows("a name")
        assert meets(Subset(rows, [0]), Subset(rows, [1]))
        assert meets(ConcatDataset([rows, Rows(1)]), rows)

    @pytest.mark.parametrize(
        "wrap",
        [
            Rows,
            lambda file: Rows([{"file": (file,)}]),
            lambda file: Rows(Slotted(file)),
            lambda file: Rows(lambda: file),
            lambda file: Rows(lambda _, file=file: file),
            lambda file: Rows(Slotted(file).__init__),
        ],
    )
    def test_one_open_file_in_two_datasets(self, wrap: Any, tmp_path: Path) -> None:
        with open(tmp_path / "rows", "wb") as file:
            assert meets(wrap(file), Rows(file))

    def test_values_and_arrays_are_shared_without_harm(self) -> None:
        common = (1, "text", None, Path("rows"), torch.zeros(3), np.zeros(3), torch.float32, Slotted, max)
        assert not meets(Rows(common), Rows(common))
        assert not meets(TensorDataset(common[4]), TensorDataset(common[4]))

    def test_long_containers_are_one_object(self) -> None:
        file = Slotted(None)
        rows = [file] * (shared.MOST_ENTRIES + 1)
        assert not meets(Rows(rows), Rows(file))
        assert meets(Rows(rows), Rows(rows))

    def test_what_reaches_too_much_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared, "MOST_OBJECTS", 3)
        assert reachable(Rows([[], [], []])) is None


def blocked(turns: ReadingTurns) -> bool:
    """Whether a thread that asks for the turn now would wait."""
    return any(one._holder is not None for one in turns._turns)


def never() -> bool:
    return False


def test_only_what_shares_an_object_waits() -> None:
    rows, more = Rows(None), Rows(None)
    first, second = ReadingTurns(Subset(rows, [0])), ReadingTurns(Subset(more, [0]))
    both = ReadingTurns(ConcatDataset([rows, more]))
    other = ReadingTurns(Rows(None))
    assert first.begin(never)
    assert not blocked(other)
    assert not blocked(second)
    assert blocked(both)
    first.end()
    assert not blocked(both)
    assert both.begin(never)
    assert blocked(first)
    assert blocked(second)
    assert not blocked(other)
    both.end()
    assert not blocked(first)


def test_the_turn_of_a_reader_that_hangs_is_taken_away() -> None:
    rows = Rows(None)
    first, second = ReadingTurns(rows), ReadingTurns(Subset(rows, [0]))
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        assert second.begin(never)
        inside.set()
        assert leave.wait(WAIT_S)
        second.end()

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(WAIT_S)
    assert blocked(first)
    second.take_away(thread)
    assert not blocked(first)
    leave.set()
    thread.join(WAIT_S)
    assert not blocked(first)


def test_what_reaches_too_much_waits_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ReadingTurns(Rows(None))
    monkeypatch.setattr(shared, "MOST_OBJECTS", 1)
    second = ReadingTurns(Rows(Rows(None)))
    assert first.begin(never)
    assert blocked(second)
    first.end()
