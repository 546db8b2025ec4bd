"""flodl's vectors by area, the checks that run them, and the list of values that differ with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

Vector = dict[str, Any]
Answers = dict[str, Any]
Check = Callable[[Vector], Answers]

HERE = Path(__file__).parent
ALL: dict[str, Vector] = {vector["id"]: vector for vector in json.loads((HERE / "flodl.json").read_text())}


class Book:
    """The vectors of some areas.

    Attributes:
        vectors: Vectors by id.
        checks: Id of a vector -> function that runs it through the production code.
        rows: Tables in the file of differences: vector, value, flowdp, reason.
        differences: (vector, value) of each row.
    """

    def __init__(self, areas: Collection[str], differences: str) -> None:
        self.vectors = {name: vector for name, vector in ALL.items() if vector["area"] in areas}
        self.checks: dict[str, Check] = {}
        lines = (HERE / differences).read_text().splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
        self.rows = [row for row in cells if row[0] != "vector" and set(row[0]) != {"-"}]
        self.differences = {(row[0], row[1]) for row in self.rows}

    def answers(self, *names: str) -> Callable[[Check], Check]:
        """Register a check for these vectors."""

        def register(check: Check) -> Check:
            for name in names:
                assert name not in self.checks
                self.checks[name] = check
            return check

        return register

    def check_rows(self) -> None:
        """Assert that every difference names a value of one of these vectors, and a reason."""
        for row in self.rows:
            assert len(row) == 4, row
            assert all(row), row
            assert row[1] in self.vectors[row[0]]["expected"], row
        assert len(self.rows) == len(self.differences), "a value has two rows"

    def check(self, name: str, agree: Callable[[Any, Any], bool]) -> None:
        """Run a vector: every value agrees, or has a row and differs."""
        expected = self.vectors[name]["expected"]
        given = self.checks[name](self.vectors[name])
        assert given.keys() == expected.keys(), (given, expected)
        for key, value in expected.items():
            if (name, key) in self.differences:
                assert not agree(given[key], value), f"{key} agrees: delete its row"
            else:
                assert agree(given[key], value), (key, given[key], value)
