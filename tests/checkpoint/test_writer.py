"""Tests of the checkpoint writer: files, snapshots, the best state, and errors."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowdp.checkpoint.file import read
from flowdp.checkpoint.folder import CheckpointFolder
from flowdp.checkpoint.machine_states import DroppedStates, WantedStates
from flowdp.checkpoint.saver import Saver
from flowdp.checkpoint.state_sender import StateSender
from flowdp.checkpoint.weights import Weights
from flowdp.checkpoint.writer import CapturedState, Checkpoint, PendingState, Writer
from flowdp.errors import CheckpointError, CollectiveError
from flowdp.options import CheckpointOptions
from flowdp.policy.tally import EpochMetrics, RankMetrics, Work
from flowdp.protocol.commands import Save
from flowdp.protocol.position import OpenEpoch, Position
from tests.limits import HANG_S


def metrics(epoch: int, loss: float) -> EpochMetrics:
    rank = RankMetrics(8, 2, 1.0, 0.0, 0.0, 0.0, loss, {}, 0.1)
    return EpochMetrics(epoch, 9, loss, {}, (rank,), 1.0, (8.0,), (1.0,), 0.1, 1, 0.0, 1, None, 1.0, 2)


LOSSES = [metrics(epoch, loss) for epoch, loss in enumerate((5.0, 2.0, 4.0, 3.0))]


def part(rank: int, value: float, *, shared: bool) -> PendingState:
    """A rank's captured state, which can be read once."""
    state: dict[str, Any] = {"optimizers": [{"rank": rank}], "scaler": None, "generator": None}
    if shared:
        state |= {"model": {"weight": torch.tensor([value])}, "buffers": {}, "ema": {}, "outer": {}}
    given = iter([state])
    return lambda: next(given)


def at(epoch: int, *, is_open: bool = False) -> Position:
    open_ = (OpenEpoch(epoch, 1, ((), ()), (Work(epoch, 0, 0), Work(epoch, 0, 0))),) if is_open else ()
    return Position(2, epoch, open_, global_step=10 * epoch, versions=epoch)


class Desk:
    """A saver, and two ranks that each capture a number."""

    def __init__(self, folder: Path | None, listens: bool = True, **options: Any) -> None:
        self.told: list[Checkpoint] = []
        self.failed: list[CheckpointError] = []
        kept = {name: options.pop(name) for name in ("keep_best", "top_k") if name in options}
        store = None if folder is None else CheckpointFolder(CheckpointOptions(folder, keep_last=9, **kept))
        self.store = store
        saved = self.told.append if listens else None
        writes = store is not None or listens
        collector = options.pop("collector", None)
        writer = Writer(store, {"seed": 0}, saved, self.failed.append, collector=collector)
        self.saver = Saver(writer if writes else None, **options)
        self.saver.start()

    def put(self, epoch: int, *, model: int = 0, is_open: bool = False, **command: Any) -> None:
        for rank in (0, 1):
            self.saver.put(rank, part(rank, float(epoch), shared=rank == model))
        given: dict[str, Any] = {"version": epoch, "snapshots": 0} | command
        self.saver.save(Save(epoch, at(epoch, is_open=is_open), model=model, **given), LOSSES)

    def close(self) -> list[int]:
        """Write all that waits; returns the epochs that listeners received."""
        assert self.saver.close(HANG_S)
        return [one.epoch for one in self.told]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event: the first file is held back until it is set."""
    opened, held = threading.Event(), iter([True])
    save = CheckpointFolder.save

    def slowly(self: CheckpointFolder, *given: Any, **options: Any) -> Path:
        if next(held, False):
            assert opened.wait(HANG_S)
        return save(self, *given, **options)

    monkeypatch.setattr(CheckpointFolder, "save", slowly)
    yield opened
    opened.set()


def wait_until_writing(saver: Saver) -> None:
    assert saver.outlet is not None
    while not saver.outlet._is_at_work:
        threading.Event().wait(0.001)


# ---------------------------------------------------------------- captured states
@pytest.mark.parametrize("first", [0, 1])
def test_a_standing_is_read_once_and_holds_the_model_once(first: int) -> None:
    parts = {rank: part(rank, 7.0, shared=rank == first) for rank in (1, 0)}
    captured = CapturedState(parts, first, at(1), LOSSES[:1])
    state = captured.read()
    assert [rank["optimizers"] for rank in state["ranks"]] == [[{"rank": 0}], [{"rank": 1}]]
    assert not any("model" in rank for rank in state["ranks"])
    assert captured.weights.model["weight"].item() == 7.0
    assert captured.read() is state


# ---------------------------------------------------------------- checkpoints
def test_a_checkpoint_is_written_and_told(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.put(2)
    assert desk.close() == [2]
    [told] = desk.told
    assert (told.version, told.epoch, told.global_step, told.path) == (2, 2, 20, desk.saver.last)
    assert repr(told) == f"<Checkpoint 2 at step 20, 2 epochs complete in {str(told.path)!r}>"
    kept = read(told.path)
    assert repr(kept["position"]) == repr(at(2))  # with NaN
    assert list(kept["history"]) == LOSSES[:2]  # of the complete epochs
    assert kept["fingerprint"] == {"seed": 0}
    module = nn.Linear(1, 1, bias=False)
    told.save(tmp_path / "copy.pt")
    assert read(tmp_path / "copy.pt")["model"].keys() == kept["model"].keys()
    with pytest.raises(RuntimeError):
        told.load_into(module)  # of another shape


def test_without_folder_and_listener_there_is_no_thread() -> None:
    desk = Desk(None, listens=False)
    assert desk.saver.thread is None
    desk.put(1)
    assert desk.saver.close()
    assert not desk.saver.is_busy


@pytest.mark.parametrize(("mode", "written"), [("min", [0, 2, 4]), ("max", [0, 1, 4]), (None, [0, 4])])
def test_a_slow_disk_gets_the_newest_and_the_best(
    tmp_path: Path, slow: threading.Event, mode: Any, written: list[int]
) -> None:
    desk = Desk(tmp_path, keep_best=None if mode is None else ("loss", mode))
    desk.put(0)
    wait_until_writing(desk.saver)
    for epoch in (1, 2, 3, 4):
        desk.put(epoch)
    assert desk.saver.is_busy
    assert not desk.saver.close(timeout_s=0.01)
    slow.set()
    assert desk.close() == written
    assert (tmp_path / "best.pt").exists() == (mode is not None)
    if mode is not None:
        assert read(tmp_path / "best.pt")["epoch"] == written[1]


@pytest.mark.parametrize(("top_k", "written"), [(1, [0, 2, 4]), (2, [0, 2, 4]), (3, [0, 2, 3, 4])])
def test_a_slow_disk_gets_the_best_few_too(
    tmp_path: Path, slow: threading.Event, top_k: int, written: list[int]
) -> None:
    desk = Desk(tmp_path, keep_best=("loss", "min"), top_k=top_k)
    desk.put(0)
    wait_until_writing(desk.saver)
    for epoch in (1, 2, 3, 4):  # with losses of 5, 2, 4 and 3
        desk.put(epoch)
    slow.set()
    assert desk.close() == written
    best = {3: [2, 4, 3]}.get(top_k, [2, 4][:top_k])
    assert [one[1].rpartition("-")[2] for one in read(desk.told[-1].path)["top"]] == [
        f"{at}.pt" for at in best
    ]


def test_what_the_sampler_drew_is_asked_for_while_it_is_known(tmp_path: Path, slow: threading.Event) -> None:
    desk = Desk(tmp_path)
    drawn = {0: 7}
    desk.put(0, is_open=True)
    wait_until_writing(desk.saver)
    desk.saver.orders = lambda position: {one.epoch: drawn[one.epoch] for one in position.open}
    drawn = {2: 8}
    desk.put(2, is_open=True)
    drawn = {}  # the sampler has moved on before the writer reads it
    slow.set()
    desk.close()
    assert [read(one.path)["orders"] for one in desk.told] == [None, {2: 8}]
    desk.saver.let_go()
    assert desk.saver.orders(at(2, is_open=True)) is None


# ---------------------------------------------------------------- the best state, and snapshots
def test_each_checkpoint_holds_the_best_model_of_its_own_moment(
    tmp_path: Path, slow: threading.Event
) -> None:
    old = Weights({"weight": torch.tensor([-1.0])}, {"weight": torch.tensor([-2.0])})
    desk = Desk(tmp_path, best=old)
    desk.put(1)
    wait_until_writing(desk.saver)
    desk.put(2, is_best=True, version=None)
    desk.put(3)
    assert desk.saver.best is not None
    assert desk.saver.best.model["weight"].item() == 2.0
    slow.set()
    desk.close()
    kept = [read(one.path) for one in desk.told]
    assert [one["best_model"]["weight"].item() for one in kept] == [-1.0, 2.0]
    assert [len(one["best_ema"]) for one in kept] == [1, 0]


def test_a_wish_is_answered_by_the_next_standing() -> None:
    desk = Desk(None, listens=False)
    found: list[CapturedState | None] = []
    asking = threading.Thread(target=lambda: found.append(desk.saver.wait_for_snapshot(2)))
    asking.start()
    desk.put(1, version=None, snapshots=1)  # answers only the first request
    assert desk.saver.wait_for_snapshot(1) is not None
    assert asking.is_alive()
    desk.put(2, version=None, snapshots=2)
    asking.join(HANG_S)
    [captured] = found
    assert captured is not None
    assert captured.position == at(2)
    assert captured.history == tuple(LOSSES[:2])


def test_nobody_waits_for_a_run_that_has_ended() -> None:
    desk = Desk(None, listens=False)
    found: list[CapturedState | None] = []
    asking = threading.Thread(target=lambda: found.append(desk.saver.wait_for_snapshot(1)))
    asking.start()
    desk.saver.end()
    asking.join(HANG_S)
    assert found == [None]


# ---------------------------------------------------------------- failing writes
def test_a_full_disk_is_a_problem_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path)
    full = iter([OSError(errno.ENOSPC, "No space left on device")])
    save = CheckpointFolder.save

    def save_or_fail(self: CheckpointFolder, *given: Any, **options: Any) -> Path:
        for error in full:
            raise CheckpointError("it cannot be written") from error
        return save(self, *given, **options)

    monkeypatch.setattr(CheckpointFolder, "save", save_or_fail)
    desk.put(1)
    while desk.saver.is_busy:
        threading.Event().wait(0.001)
    desk.put(2)
    assert desk.close() == [2]
    assert desk.saver.problems == ["it cannot be written"]
    assert desk.failed == []


def test_what_a_device_could_not_give_is_a_failure(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("the device is gone")

    desk = Desk(tmp_path)
    desk.saver.put(0, broken)
    desk.saver.save(Save(0, at(1), version=4, snapshots=0), LOSSES)
    desk.close()
    [error] = desk.failed
    assert str(error) == "checkpoint 4 failed: RuntimeError: the device is gone"
    assert (error.version, type(error.__cause__)) == (4, RuntimeError)


# ---------------------------------------------------------------- several machines
class Others:
    """Stands for the states of another machine with one rank."""

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.collected: list[int] = []
        self.error: Exception | None = None

    def collect(self, capture: int) -> list[dict[str, Any]]:
        self.collected.append(capture)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return [{"optimizers": [{"rank": 2}], "scaler": None, "generator": None}]

    def drop(self, captures: list[int]) -> None:
        self.dropped += captures


def test_a_file_has_the_states_of_other_machines_and_they_hear_what_is_not_written(
    tmp_path: Path, slow: threading.Event
) -> None:
    others = Others()
    desk = Desk(tmp_path, collector=others)
    desk.put(1)
    wait_until_writing(desk.saver)
    for epoch in (2, 3, 4):
        desk.put(epoch)
    slow.set()
    assert desk.close() == [1, 4]
    assert (others.collected, others.dropped) == ([1, 4], [2, 3])
    kept = read(desk.told[-1].path)["ranks"]
    assert [rank["optimizers"] for rank in kept] == [[{"rank": rank}] for rank in (0, 1, 2)]


def test_a_lost_machine_leaves_a_checkpoint_out_and_the_next_one_is_written(tmp_path: Path) -> None:
    others = Others()
    others.error = CheckpointError("the checkpoint lacks states")
    others.error.__cause__ = CollectiveError("machine 1 was lost")
    desk = Desk(tmp_path, collector=others)
    desk.put(1)
    while not desk.saver.problems:  # it may not be replaced by the next one
        threading.Event().wait(0.001)
    desk.put(2)
    assert desk.close() == [2]
    assert desk.failed == []  # the run's end is that of the lost machine
    assert others.collected == [1, 2]


class Road:
    """Stands for the way to machine 0."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, value: Any, machine: int) -> None:
        self.sent.append((machine, value.capture, [rank["optimizers"] for rank in value.states]))


def test_a_machine_that_follows_sends_its_states_and_keeps_the_best_model() -> None:
    road: Any = Road()
    sender = StateSender(road)
    saver = Saver(sender)
    saver.start()
    # The rank with the model of all is on machine 0; here the first one has it where it is the best.
    for epoch, is_best in ((1, True), (2, False)):
        for rank in (2, 3):
            saver.put(rank, part(rank, float(epoch), shared=is_best and rank == 2))
        saver.save(Save(epoch, at(epoch), epoch, 0, 0, is_best), LOSSES)
    saver.save(Save(3, at(2), None, 1), LOSSES)  # a snapshot, for the user of machine 0
    assert saver.best is not None
    assert saver.best.model["weight"].item() == 1.0
    assert saver.is_busy
    sender.take(DroppedStates((1,)))
    sender.take(WantedStates(2))
    assert saver.close(HANG_S)
    assert road.sent == [(0, 2, [[{"rank": 2}], [{"rank": 3}]])]
    assert not saver.is_busy
