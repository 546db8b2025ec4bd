"""A run on several machines is resumed with the optimizer state of each rank, on any number of machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowdp.checkpoint.file import read
from tests.machines.launch import Job
from tests.machines.states import BEST, CASES, EPOCHS, OWN, SAMPLES, STEPS, moments

pytestmark = pytest.mark.posix

RANKS = 4  # of two machines with two devices each


def job(what: str, devices: str, folder: Path, *cases: str) -> Job:
    processes = len(devices.split(","))
    return Job("tests.machines.states", what, devices, folder, *cases, processes=processes)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Job]]:
    """A job that has trained a part of each case, and the folder with its checkpoints."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with job("begin", "2,2", folder, *CASES) as done:
        done.ended()
        yield folder, done


@pytest.fixture(scope="module", params=["1,1,1"], ids=["three machines"])
def resumed(request: pytest.FixtureRequest, begun: tuple[Path, Job]) -> Iterator[tuple[list[int], Job]]:
    """A job that has resumed them, and the devices of its machines."""
    devices: str = request.param
    with job("resume", devices, begun[0], *CASES) as done:
        done.ended()
        yield [int(one) for one in devices.split(",")], done


def newest(folder: Path, case: str) -> dict[str, Any]:
    return read(max((folder / case).glob("step-*.pt")))


def counts(done: Job, case: str, epoch: int) -> list[str]:
    return [
        one["counts"]
        for one in done.records
        if one["what"] == "epoch" and (one["case"], one["epoch"]) == (case, epoch)
    ]


def total(parts: list[str]) -> list[int]:
    return [sum(map(int, digits)) for digits in zip(*parts, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_the_file_has_the_state_of_each_rank_that_has_one_of_its_own(
    begun: tuple[Path, Job], case: str
) -> None:
    folder, done = begun
    kept = [moments(rank["optimizers"]) for rank in newest(folder, case)["ranks"]]
    saved = done.wait_for("saved", where=lambda one: one["case"] == case)
    last = {one["rank"]: one["digest"] for one in saved}
    # Where all have the same state, the rank with the model alone copies it.
    assert sorted(last) == (list(range(RANKS)) if case in OWN else [0])
    assert kept == [last.get(rank, last[0]) for rank in range(len(kept))]
    assert len(kept) == (RANKS if case in OWN else RANKS // 2)
    assert len(set(kept)) == (RANKS if case in OWN else 1)
    assert all((one["machine"], one["rank"]) == (0, 0) for one in saved if one["shared"])


@pytest.mark.parametrize("case", CASES)
def test_a_part_of_an_epoch_is_trained_by_both_machines(begun: tuple[Path, Job], case: str) -> None:
    _, done = begun
    first, second = done.wait_for("trained", 2, lambda one: one["case"] == case)
    assert (first["digest"], first["steps"]) == (second["digest"], second["steps"])
    assert first["problems"] == second["problems"] == []
    if case != "sync":
        assert (first["steps"], first["done"]) == (STEPS, 1)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_resumes_from_the_state_of_its_number(
    begun: tuple[Path, Job], resumed: tuple[list[int], Job], case: str
) -> None:
    kept = [moments(rank["optimizers"]) for rank in newest(begun[0], case)["ranks"]]
    devices, done = resumed
    restored = done.wait_for("restored", sum(devices), lambda one: one["case"] == case)
    assert {one["rank"]: one["digest"] for one in restored} == {
        rank: kept[rank if case in OWN else 0] for rank in range(sum(devices))
    }


@pytest.mark.parametrize("case", CASES)
def test_every_sample_of_the_interrupted_epoch_is_trained_once(
    begun: tuple[Path, Job], resumed: tuple[list[int], Job], case: str
) -> None:
    folder, before = begun
    epoch = newest(folder, case)["epoch"]
    parts = counts(before, case, epoch)
    assert 0 < sum(total(parts)) < SAMPLES
    devices, done = resumed
    assert total([*parts, *counts(done, case, epoch)]) == [1] * SAMPLES
    ended = done.wait_for("trained", len(devices), lambda one: one["case"] == case)
    assert {one["digest"] for one in ended} == {ended[0]["digest"]}
    assert all(one["done"] == EPOCHS for one in ended)


def test_exact_keeps_the_random_numbers_of_every_rank(tmp_path: Path) -> None:
    with job("draw", "2,2", tmp_path) as done:
        done.ended()
        restored = done.wait_for("generator", RANKS)
    assert {one["rank"]: one["state"] for one in restored} == {rank: [rank + 1] for rank in range(RANKS)}
    ranks = read(min((tmp_path / "draws").glob("step-*.pt")))["ranks"]
    assert [rank["generator"].tolist() for rank in ranks] == [[rank + 1] for rank in range(RANKS)]
    assert len({moments(rank["optimizers"]) for rank in ranks}) == 1


def test_every_machine_returns_the_best_model(tmp_path: Path) -> None:
    with job("best", "1,2", tmp_path) as done:
        done.ended()
        first, second = done.wait_for("best", 2)
    assert first["scores"] == second["scores"]
    assert first["scores"].index(min(first["scores"])) == BEST
    assert len(first["scores"]) == BEST + 3
    assert first["seen"] == second["seen"]
    assert first["digest"] == second["digest"] == first["seen"][BEST]
