"""Tests of parts of a batch that all ranks share."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowdp.data.batches import Portion, cuts, joined
from flowdp.errors import DataError
from flowdp.protocol.messages import SampleRange

Pair = namedtuple("Pair", "x y")
ROWS = torch.arange(12).reshape(6, 2)


def test_tensors_as_long_as_the_batch_are_cut_and_the_rest_goes_whole() -> None:
    table, rows_of_text = torch.ones(4), list("abcdef")
    batch = {
        "x": ROWS,
        "more": [np.arange(6), "text", 3],
        "table": table,
        "one": torch.tensor(6),
        "texts": rows_of_text,
        "ids": (7, 8, 9, 10, 11, 12),
        "words": [["a", "b"], ["c"], [], ["d"], ["e"], ["f", "g"]],
    }
    portion = Portion.of(batch, 6, SampleRange(2, 5))
    rows = portion.rows(1, 3)
    assert portion.samples == 3
    assert rows["x"].tolist() == ROWS[3:5].tolist()
    assert rows["x"].data_ptr() == ROWS[3:].data_ptr(), "nothing is copied"
    assert rows["more"][0].tolist() == [3, 4]
    assert rows["more"][1:] == ["text", 3]
    assert rows["table"] is table
    assert rows["texts"] == ["d", "e"]
    assert rows["ids"] == (10, 11)
    assert rows["words"] == [["d"], ["e"]]
    assert rows["one"] == 6
    assert portion.whole is batch


def test_what_is_whole_stays_so_where_it_is_as_long_as_the_part() -> None:
    """The batch decides which leaves are samples, and its rest does not decide again."""
    table = torch.arange(2.0)
    rows = Portion.of((ROWS, table), 6, SampleRange(0, 2)).rows(0, 1)
    assert [len(leaf) for leaf in rows] == [1, 2]


@pytest.mark.parametrize("batch", [ROWS, [ROWS], (ROWS, ROWS), Pair(ROWS, ROWS), {"a": {"b": ROWS}}])
def test_a_batch_keeps_its_form(batch: Any) -> None:
    assert type(Portion.of(batch, 6, SampleRange(0, 3)).rows(0, 2)) is type(batch)


@pytest.mark.parametrize("batch", [["a"] * 5, torch.ones(5, 6), {"n": 6}, []])
def test_nothing_to_cut(batch: Any) -> None:
    with pytest.raises(DataError, match=f"nothing in this {type(batch).__name__} is 6 long"):
        Portion.of(batch, 6, SampleRange(0, 3))


def test_what_was_gathered_is_cut_everywhere() -> None:
    portion = Portion.gathered([ROWS, ROWS[:, 0]], lambda parts: Pair(*parts))
    assert portion.rows(4, 6).y.tolist() == [8, 10]
    assert portion.samples == 6


def batch(start: int, stop: int) -> dict[str, Any]:
    rows = torch.arange(start, stop)
    return {"x": rows, "y": [rows.float(), "text"], "table": torch.arange(9.0), "one": torch.tensor(start)}


def test_what_is_as_long_as_its_batch_is_joined() -> None:
    made = joined([batch(0, 3), batch(3, 5)], [3, 2])
    assert made["x"].tolist() == [0, 1, 2, 3, 4]
    rows, text = made["y"]
    assert isinstance(rows, Tensor)
    assert (len(rows), text) == (5, "text")
    assert len(made["table"]) == 9
    assert made["one"] == 0


def test_what_cannot_be_joined() -> None:
    with pytest.raises(TypeError, match="differ in structure"):
        joined([{"x": torch.ones(2)}, {"y": torch.ones(2)}], [2, 2])
    with pytest.raises(ValueError, match=r"as long as the batch \(3 samples\)"):
        joined([["a", "b"], ["a", "b"]], [3, 3])
    padded = [{"ids": torch.ones(2, length)} for length in (5, 7)]
    with pytest.raises(
        ValueError, match=r"batch\['ids'\] \(tensor \(2, 5\), tensor \(2, 7\)\) differs in shape"
    ):
        joined(padded, [2, 2])


def test_cuts_are_as_equal_as_can_be() -> None:
    assert list(cuts(7, 3)) == [(0, 2), (2, 4), (4, 7)]
    assert list(cuts(3, 3)) == [(0, 1), (1, 2), (2, 3)]
