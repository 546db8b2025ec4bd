"""Tests of resuming: the state restored, and refusals."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from flowdp.checkpoint.file import write
from flowdp.checkpoint.fingerprint import orders
from flowdp.checkpoint.folder import CheckpointFolder
from flowdp.data.source import Source
from flowdp.errors import CheckpointError, OptionError
from flowdp.options import CheckpointOptions
from flowdp.policy.tally import Work
from flowdp.protocol.position import OpenEpoch, Position
from flowdp.replica.rank_state import capture
from flowdp.replica.replica import Replica
from flowdp.trainer.result import TrainedState, resumed_from
from flowdp.trainer.resume import Resumed, find
from tests.data.opening import opened
from tests.parts import parts_of

PRINT = {
    "model": {"weight": "float32 (1, 1)"},
    "dataset_length": 8,
    "optimizers": [],
    "order": {"batch_size": 4},
}


def replica(value: float = 0.0) -> Replica:
    """A replica that has taken a step, so that its optimizer has state."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    optimizer = torch.optim.SGD(module.parameters(), 0.0, momentum=0.9)
    module.weight.grad = torch.full((1, 1), value)
    optimizer.step()
    return Replica(parts_of(module, optimizer), lambda *_: None)


def position(*, done: int = 1, open_: bool = False, step: int = 2) -> Position:
    inside = (OpenEpoch(done, 1, ((), ()), (Work(done, 0, 0), Work(done, 0, 0))),) if open_ else ()
    return Position(2, done, inside, step, versions=3)


def state(ranks: Sequence[float] = (1.0, 2.0), **changes: Any) -> dict[str, Any]:
    parts = [capture(replica(value), shared=rank == 0)() for rank, value in enumerate(ranks)]
    shared = {name: parts[0].pop(name) for name in ("model", "buffers", "ema", "outer")}
    given = {
        **shared,
        "version": 3,
        "epoch": 1,
        "global_step": 2,
        "position": position(),
        "ranks": parts,
        "history": (),
        "fingerprint": PRINT,
        "orders": None,
        "best": None,
        "best_model": {},
        "best_ema": {},
        "top": [],
    }
    return given | changes


def store(folder: Path, **options: Any) -> CheckpointFolder:
    return CheckpointFolder(CheckpointOptions(folder, **options))


def momenta(replicas: Sequence[Replica]) -> list[float]:
    buffers = [one.optimizers[0].state[one.module.weight]["momentum_buffer"] for one in replicas]
    return [float(buffer) for buffer in buffers]


# ---------------------------------------------------------------- finding
def test_nothing_is_looked_for_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert find(False, None) is None
    assert find(False, store(tmp_path)) is None
    assert find(True, store(tmp_path)) is None  # a fresh start


def test_the_newest_of_the_folder(tmp_path: Path) -> None:
    folder = store(tmp_path, keep_best=("loss", "min"))
    for version, value in ((1, 2.0), (2, 5.0)):
        folder.save(state(), version=version, global_step=version, value=value)
    later = store(tmp_path, keep_best=("loss", "min"))
    found = find(True, later)
    assert found is not None
    assert found.path == tmp_path / "step-000000000002-2.pt"
    assert later.best == 2.0  # to be beaten by the next ones
    assert found.best is None
    assert [rank["optimizers"][0]["state"][0]["momentum_buffer"].item() for rank in found.ranks] == [1.0, 2.0]


@pytest.mark.parametrize("text", [False, True])
def test_a_file_or_a_folder(tmp_path: Path, text: bool) -> None:
    file = store(tmp_path / "old").save(state(orders={1: 7}), version=1, global_step=2)
    for place in (file, tmp_path / "old"):
        for own in (None, store(tmp_path / "new"), store(tmp_path / "old")):
            found = find(str(place) if text else place, own)
            assert found is not None
            assert (found.path, found.orders) == (file, {1: 7})
            assert str(found) == f"checkpoint {str(file)!r}"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint") as caught:
        find(tmp_path, None)
    assert caught.value.path == str(tmp_path)
    with pytest.raises(CheckpointError, match=r"nobody\.pt"):
        find(tmp_path / "nobody.pt", None)


@pytest.mark.parametrize("resume", [False, "file"])
def test_a_folder_that_another_run_has_filled(tmp_path: Path, resume: Any) -> None:
    store(tmp_path / "theirs").save(state(), version=1, global_step=2)
    write(tmp_path / "file.pt", state())
    given = tmp_path / "file.pt" if resume else False
    with pytest.raises(OptionError, match=r"holds checkpoints of another run, the newest 'step-0"):
        find(given, store(tmp_path / "theirs"))


def test_none_that_can_be_read_is_no_fresh_start(tmp_path: Path) -> None:
    file = store(tmp_path).save(state(), version=1, global_step=2)
    file.write_bytes(file.read_bytes()[:-1])
    for place in (True, tmp_path):
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints in"):
            find(place, store(tmp_path))


# ---------------------------------------------------------------- checking
def resumed(**changes: Any) -> Resumed:
    given: dict[str, Any] = {"position": position(), "model": {}, "ranks": [{}], "fingerprint": PRINT}
    return Resumed(**given | changes)


@pytest.mark.parametrize("open_", [False, True])
def test_what_may_differ_and_what_not(open_: bool) -> None:
    one = resumed(position=position(open_=open_), path=Path("a.pt"))
    one.check(PRINT, None, None)
    with pytest.raises(CheckpointError, match=r"from checkpoint 'a.pt': the dataset had 8 samples") as caught:
        one.check({**PRINT, "dataset_length": 9}, None, None)
    assert (caught.value.path, caught.value.version) == ("a.pt", 3)
    other_order = {**PRINT, "order": {"batch_size": 5}}
    if open_:
        with pytest.raises(CheckpointError, match="batch_size was 4, it is 5 now"):
            one.check(other_order, None, None)
    else:
        one.check(other_order, None, None)


# ---------------------------------------------------------------- the order of an open epoch
def source(*epochs: list[int]) -> Source:
    """A source whose sampler draws these in turn; without any, one in flowdp's order."""

    class Listed:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter(next(listed))

    listed = iter(epochs)
    dataset: Any = DataLoader(range(9), 2, sampler=Listed()) if epochs else range(9)
    return opened(dataset, None if epochs else 2, epochs=4)


def inside(*begun: bool) -> Position:
    """A position with one epoch complete, and parts of the open ones trained."""
    left: list[tuple[int, ...]] = [() if one else (0,) for one in begun]
    open_ = tuple(OpenEpoch(1 + i, 1, (batches,), (Work(1 + i, 0, 0),)) for i, batches in enumerate(left))
    return Position(1, 1, open_, 2, versions=3)


A, B, C = [0, 1, 2], [1, 0, 2], [7, 8, 6]
SUMS = {1: zlib.crc32(struct.pack("<3q", *B)), 2: zlib.crc32(struct.pack("<3q", *C))}


def test_a_sampler_that_draws_the_same_may_go_on() -> None:
    one = resumed(position=inside(True, True), orders=SUMS)
    same = source(A, B, C)
    one.check_orders(same)
    assert orders(same, one.position) == SUMS  # to be saved in the next checkpoint


@pytest.mark.parametrize(
    ("epochs", "begun", "named"),
    [
        ((B, A, C), (True, True), 1),
        ((A, B, A), (True, True), 2),
        ((B, A), (True,), 1),
        ((), (True, True), 1),  # flowdp's order now
    ],
)
def test_a_sampler_that_draws_another_order_is_refused(
    epochs: tuple[list[int], ...], begun: tuple[bool, ...], named: int
) -> None:
    one = resumed(position=inside(*begun), orders=SUMS, path=Path("a.pt"))
    with pytest.raises(
        CheckpointError, match=rf"from checkpoint 'a\.pt': epoch {named + 1} is partly .*set_epoch"
    ) as error:
        one.check_orders(source(*epochs))
    assert (error.value.path, error.value.version) == ("a.pt", 3)


def test_a_sampler_in_place_of_flowdps_own_order_is_refused() -> None:
    one = resumed(position=inside(True), orders={})
    one.check_orders(source())
    with pytest.raises(CheckpointError, match="epoch 2 is partly"):
        one.check_orders(source(A, B))


def test_an_epoch_of_which_nothing_is_trained_may_have_any_order() -> None:
    second, first = {2: SUMS[2]}, {1: SUMS[1]}
    resumed(position=inside(False, True), orders=second).check_orders(source(A, A, C))
    resumed(position=inside(True, False), orders=first).check_orders(source(A, B, A))


# ---------------------------------------------------------------- restoring
@pytest.mark.parametrize(("devices", "expected"), [(1, [1.0]), (2, [1.0, 2.0]), (3, [1.0, 2.0, 1.0])])
def test_each_rank_takes_its_own_and_new_ones_those_of_the_first(
    tmp_path: Path, devices: int, expected: list[float]
) -> None:
    write(tmp_path / "a.pt", state())
    found = find(tmp_path / "a.pt", None)
    assert found is not None
    replicas = [replica(9.0) for _ in range(devices)]
    found.put_back(replicas)
    assert momenta(replicas) == expected
    assert {one.module.weight.item() for one in replicas} == {1.0}
    replicas[0].optimizers[0].state[replicas[0].module.weight]["momentum_buffer"].fill_(7.0)
    assert momenta(replicas)[1:] == expected[1:]  # no shared memory


@pytest.mark.parametrize("many", [False, True])
def test_a_given_state_is_that_of_all_ranks(many: bool) -> None:
    first = replica(4.0)
    optimizer: Any = first.optimizers[0].state_dict()
    given: Any = [optimizer] if many else optimizer
    one = resumed_from(TrainedState(first.module.state_dict(), given, (), 12, 0, interrupted=True))
    assert (one.position.done, one.position.global_step, one.position.planned) == (0, 12, 12)
    replicas = [replica(9.0), replica(8.0)]
    one.put_back(replicas)
    assert momenta(replicas) == [4.0, 4.0]
