"""Tests of the checkpoint folder: the newest checkpoint, those kept, leftovers, and the run that owns it."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import flowdp
from flowdp import OptionError
from flowdp.checkpoint import file as checkpoint_file
from flowdp.checkpoint.file import read
from flowdp.checkpoint.folder import CheckpointFolder, FolderLock
from flowdp.errors import CheckpointError
from flowdp.options import CheckpointOptions
from flowdp.protocol.position import Position
from tests.limits import HANG_S


def state(value: float = 0.0) -> dict[str, Any]:
    return {
        "epoch": 0,
        "position": Position(1),
        "model": {"weight": torch.full((2,), value)},
        "buffers": {},
        "ranks": [{}],
        "history": (),
        "fingerprint": {},
    }


def fill(store: CheckpointFolder, values: list[float | None], first: int = 1) -> None:
    for version, value in enumerate(values, first):
        store.save(state(version), version=version, global_step=10 * version, value=value)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_newest_ones_stay(tmp_path: Path) -> None:
    store = CheckpointFolder(CheckpointOptions(tmp_path / "deep" / "er", keep_last=2))
    assert store.newest() is None
    fill(store, [None] * 4)
    assert [path.name for path in store.paths()] == ["step-000000000040-4.pt", "step-000000000030-3.pt"]
    assert names(tmp_path / "deep" / "er") == ["step-000000000030-3.pt", "step-000000000040-4.pt"]
    found = store.newest()
    assert found is not None
    path, newest = found
    assert path == store.paths()[0]
    assert (newest["version"], newest["global_step"], newest["best"]) == (4, 40, None)


def test_one_between_is_replaced_by_the_next_and_takes_no_place(tmp_path: Path) -> None:
    store = CheckpointFolder(CheckpointOptions(tmp_path, keep_last=2))

    def kept(version: int, *, is_between: bool) -> list[int]:
        store.save(state(), version=version, global_step=version, is_between=is_between)
        return [read(path)["version"] for path in store.paths()]

    assert kept(1, is_between=True) == [1]
    assert kept(2, is_between=True) == [2]
    assert kept(3, is_between=False) == [3]
    assert kept(4, is_between=False) == [4, 3]
    assert kept(5, is_between=True) == [5, 4, 3]
    assert kept(6, is_between=False) == [6, 4]


def test_one_between_that_is_among_the_best_stays(tmp_path: Path) -> None:
    store = CheckpointFolder(CheckpointOptions(tmp_path, keep_last=1, keep_best=("loss", "min")))
    store.save(state(), version=1, global_step=1, value=0.1, is_between=True)
    store.save(state(), version=2, global_step=2, value=0.2)
    assert [read(path)["version"] for path in store.paths()] == [2, 1]


@pytest.mark.parametrize(("mode", "winners"), [("min", [2, 2, 4, 4, 4]), ("max", [2, 3, 3, 3, 6])])
def test_the_best_one_stays_besides(tmp_path: Path, mode: Any, winners: list[int]) -> None:
    store = CheckpointFolder(CheckpointOptions(tmp_path, keep_last=1, keep_best=("loss", mode)))
    values = [math.nan, 0.5, 0.7, 0.4, math.nan, 0.9]
    fill(store, values[:1])
    assert store.best is None
    for version, (value, winner) in enumerate(zip(values[1:], winners, strict=True), 2):
        fill(store, [value], version)
        best = read(tmp_path / "best.pt")
        assert (best["version"], best["best"]) == (winner, values[winner - 1])
        assert read(store.paths()[0])["best"] == values[winner - 1]
        assert {"best.pt", f"step-{10 * winner:012d}-{winner}.pt", store.paths()[0].name} == set(
            names(tmp_path)
        )
    fill(store, [None], 7)
    assert read(tmp_path / "best.pt")["version"] == winners[-1]


def test_a_run_that_goes_on_keeps_the_best_value(tmp_path: Path) -> None:
    options = CheckpointOptions(tmp_path, keep_best=("loss", "min"))
    fill(CheckpointFolder(options), [0.5])
    again = CheckpointFolder(options)
    found = again.newest()
    assert found is not None
    again.follow(found[1])
    fill(again, [0.6], 2)
    assert read(tmp_path / "best.pt")["version"] == 1
    other = CheckpointFolder(CheckpointOptions(tmp_path, keep_best=("accuracy", "max")))
    other.follow(found[1])
    fill(other, [0.2], 3)  # another metric: nothing to compare it with
    assert read(tmp_path / "best.pt")["version"] == 3


@pytest.mark.parametrize(("mode", "winners"), [("min", [6, 2, 3]), ("max", [1, 5, 4])])
def test_the_best_few_stay_and_a_run_that_goes_on_continues_their_list(
    tmp_path: Path, mode: Any, winners: list[int]
) -> None:
    options = CheckpointOptions(tmp_path, keep_last=1, keep_best=("loss", mode), top_k=3)
    values = [0.9, 0.2, 0.3, 0.4, 0.5, 0.1, math.nan, -math.inf, math.inf, None, 0.35, 0.3, 0.4]
    for version, value in enumerate(values, 1):
        store = CheckpointFolder(options)  # each run writes one
        if (found := store.newest()) is not None:
            store.follow(found[1])
        fill(store, [value], version)
    best = [f"step-{10 * winner:012d}-{winner}.pt" for winner in winners]
    assert names(tmp_path) == sorted(["best.pt", *best, "step-000000000130-13.pt"])
    assert read(tmp_path / "best.pt")["version"] == winners[0]
    assert read(store.paths()[0])["top"] == [
        [values[winner - 1], name] for winner, name in zip(winners, best, strict=True)
    ]


def test_files_that_are_gone_leave_their_place_to_others(tmp_path: Path) -> None:
    options = CheckpointOptions(tmp_path, keep_last=1, keep_best=("loss", "min"), top_k=2)
    fill(CheckpointFolder(options), [0.1])
    last = read(tmp_path / "step-000000000010-1.pt")
    (tmp_path / "step-000000000010-1.pt").unlink()
    store = CheckpointFolder(options)
    store.follow(last)
    fill(store, [0.3, 0.2, 0.4], 2)
    assert names(tmp_path) == [
        "best.pt",
        *(f"step-000000000{10 * version:03d}-{version}.pt" for version in (2, 3, 4)),
    ]
    assert read(tmp_path / "best.pt")["version"] == 1  # still the one to beat


def test_one_that_cannot_be_read_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointFolder(CheckpointOptions(tmp_path, keep_best=("loss", "min")))
    fill(store, [0.1, 0.2, 0.3])
    newest, middle, oldest = store.paths()
    newest.write_bytes(newest.read_bytes()[:-10])
    middle.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "flowdp"):
        found = store.newest()
    assert found is not None
    assert found[0] == oldest
    assert [newest.name in caplog.messages[0], "damaged" in caplog.messages[0]] == [True, True]
    assert [middle.name in caplog.messages[1], "damaged" in caplog.messages[1]] == [True, True]
    oldest.unlink()
    found = store.newest()
    assert found is not None
    assert found[0].name == "best.pt"
    (tmp_path / "best.pt").write_bytes(b"x")
    assert store.newest() is None


def test_a_run_that_begins_anew_in_a_used_folder_is_the_newest(tmp_path: Path) -> None:
    options = CheckpointOptions(tmp_path, keep_last=2)
    fill(CheckpointFolder(options), [None] * 5)
    anew = CheckpointFolder(options)
    path = anew.save(state(), version=1, global_step=10)
    assert path.name == "step-000000000010-6.pt"
    found = anew.newest()
    assert found is not None
    assert (found[0], found[1]["version"]) == (path, 1)
    assert len(anew.paths()) == 2


def test_what_is_unfinished_is_removed_and_the_rest_left_alone(tmp_path: Path) -> None:
    fill(CheckpointFolder(CheckpointOptions(tmp_path)), [None])
    mine = ["step-000000000020-2.pt.tmp", "best.pt.tmp"]
    others = ["notes.txt", "model.pt", "model.pt.tmp", "step-1.pt"]
    for name in mine + others:
        (tmp_path / name).write_text("x")
    store = CheckpointFolder(CheckpointOptions(tmp_path))
    assert store.newest() is not None
    assert set(mine) <= set(names(tmp_path))  # reading alone removes nothing: a run may be using the folder
    fill(store, [None], 2)
    assert names(tmp_path) == sorted([*others, "step-000000000010-1.pt", "step-000000000020-2.pt"])
    fill(store, [None] * 5, 3)
    assert set(others) <= set(names(tmp_path))


def test_a_checkpoint_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointFolder(CheckpointOptions(tmp_path, keep_last=1, keep_best=("loss", "min")))
    fill(store, [0.5])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match=r"ranks\[0\]\.hook") as error:
        store.save({**state(), "ranks": [{"hook": names}]}, version=2, global_step=20, value=0.1)
    assert error.value.version == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert store.best == 0.5


def test_a_folder_that_is_deleted_while_a_run_trains_is_made_again(tmp_path: Path) -> None:
    store = CheckpointFolder(CheckpointOptions(tmp_path / "a"))
    fill(store, [None])
    shutil.rmtree(tmp_path / "a")
    fill(store, [None], 2)
    assert names(tmp_path / "a") == ["step-000000000020-2.pt"]


STEPS = ("fsync", "read", "_name_also", "replace", "_sync_folder")


@pytest.mark.posix
@pytest.mark.parametrize("at", [*((step, "before") for step in STEPS), *((step, "after") for step in STEPS)])
def test_a_process_that_is_killed_leaves_whole_files(tmp_path: Path, at: tuple[str, str]) -> None:
    options = CheckpointOptions(tmp_path, keep_last=1, keep_best=("loss", "min"))
    fill(CheckpointFolder(options), [0.5])
    child = os.fork()
    if child == 0:
        try:
            _die_in(*at)
            CheckpointFolder(options).save(state(2), version=2, global_step=20, value=0.1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    store = CheckpointFolder(options)
    found = store.newest()
    assert found is not None
    there = [name for name in names(tmp_path) if name.startswith("step-") and name.endswith(".pt")]
    assert found[1]["version"] == (2 if len(there) == 2 else 1)
    assert read(tmp_path / "best.pt")["version"] in (1, 2)
    fill(store, [0.05], 3)
    assert read(tmp_path / "best.pt")["version"] == 3
    assert len(names(tmp_path)) == 2


def _die_in(step: str, when: str) -> None:
    """Kill this process in the middle of writing a checkpoint."""
    owner: Any = {"fsync": os, "replace": Path}.get(step, checkpoint_file)
    whole = getattr(owner, step)

    def call(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            whole(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, step, call)


ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import os, sys, time, warnings
from pathlib import Path
from flowdp.checkpoint.folder import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os.close(1)
    sys.stdin.read()  # outlives its parent, as a process of a DataLoader may
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def trainer(folder: Path, **options: Any) -> flowdp.Trainer:
    given: dict[str, Any] = {
        "policy": "cadence", "dataset": torch.ones(40, 1), "per_device_batch_size": 2, "epochs": None,
        "max_steps": 10**9, "devices": 2,
        "checkpoint": folder, "resume": True,
        "loss": lambda model, batch: (model(batch) - batch).square().mean(),
    } | options  # fmt: skip
    return flowdp.Trainer(torch.nn.Linear(1, 1), lambda params: torch.optim.SGD(params, 1e-3), **given)


@pytest.mark.posix
def test_a_cell_that_is_run_twice(tmp_path: Path) -> None:
    first = trainer(tmp_path).start()
    try:
        again = trainer(tmp_path)
        said = rf"checkpoint='{tmp_path}': a live run writes there.*flowdp\.runs\(\)"
        with pytest.raises(OptionError, match=said):
            again.start()
        with pytest.raises(OptionError, match="a live run"):
            trainer(tmp_path, resume=False).start()
        assert flowdp.runs() == (first,)
    finally:
        first.stop()
        first.join()
    run = again.start()
    run.stop()
    run.join()


@pytest.mark.posix
def test_a_killed_process_holds_nothing_though_its_child_lives(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        mine = FolderLock(tmp_path)
        try:
            with pytest.raises(OptionError, match="a live run writes there"):
                mine.take()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(HANG_S)
        os.kill(child, 0)  # it exists
        mine.take()
        mine.give_back()


@pytest.mark.posix
def test_a_run_that_fails_gives_its_folder_back(tmp_path: Path) -> None:
    def fails(model: Any, batch: Any) -> Any:
        raise ValueError("boom")

    with pytest.raises(flowdp.StepError):
        trainer(tmp_path, loss=fails).fit()
    lock = FolderLock(tmp_path)
    lock.take()
    lock.give_back()


@pytest.mark.posix
def test_the_last_file_of_a_run_that_has_ended_is_waited_for(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    first.end()
    writing = threading.Timer(0.05, first.give_back)
    writing.start()
    second.take()
    writing.join()
    with pytest.raises(OptionError):
        first.take()
    second.give_back()
