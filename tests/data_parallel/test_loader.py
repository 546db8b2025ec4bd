"""Tests of loaders: every batch is dealt once, ahead of its use, and no thread is left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flowdp.data_parallel.loader import Epoch, interleaved
from flowdp.device.streams import HostLane, Lane, StreamLane
from flowdp.errors import DataError
from tests.accelerators import OnXpu
from tests.data.cards import Card, CardLane
from tests.limits import HANG_S
from tests.loops import CPU

LANES: list[Lane] = [HostLane(CPU), HostLane(CPU)]
CARDS: list[Lane] = [StreamLane(torch.device("cpu", 0), Card()) for _ in range(2)]


class Deals:
    """A cadence: sizes of the windows in turn, the last one of all that follow."""

    def __init__(self, *deals: Sequence[int], due: Sequence[int] = ()) -> None:
        self.deals, self.due = list(deals), due

    @property
    def quotas(self) -> Sequence[int]:
        return self.deals.pop(0) if len(self.deals) > 1 else self.deals[0]


def epoch(
    loader: Any, *deals: Sequence[int], lanes: Sequence[Lane] = LANES, due: Sequence[int] = ()
) -> Epoch:
    return Epoch(loader, lanes, Deals(*deals, due=due) if deals else None)  # type: ignore[arg-type]


def data(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of these sizes; samples are numbered consecutively."""
    ids = torch.arange(sum(sizes)).split(sizes)
    return [(number.float(), number) for number in ids]


def ids_of(windows: Any) -> list[list[int]]:
    return [window[1].tolist() for window in windows]


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain(*lists))


# ---------------------------------------------------------------- dealing
@pytest.mark.parametrize(
    ("counts", "ranks"),
    [
        ((1, 3), [1, 1, 0, 1]),
        ((4, 2), [0, 0, 1, 0, 0, 1]),
        ((0, 2), [1, 1]),
    ],
)
def test_batches_of_a_window_lie_in_the_order_in_which_they_end(counts: Any, ranks: list[int]) -> None:
    assert interleaved(counts) == ranks


def test_a_rank_that_is_due_has_its_first_batch_before_the_others() -> None:
    assert interleaved((3, 1), (1,)) == [1, 0, 0, 0]
    assert interleaved((3, 2), (1,)) == [1, 0, 0, 0, 1]
    windows = list(epoch(data(*[2] * 4), (1000, 10), due=(1,)))
    assert [[piece.rank for piece in window.pieces] for window in windows] == [[1, 0, 0, 0]]


def test_windows_hold_whole_batches_and_the_last_holds_what_is_left() -> None:
    windows = list(epoch(data(4, 4, 4, 4, 4, 4, 3), (2, 1)))
    assert [[(piece.rank, piece.samples) for piece in window.pieces] for window in windows] == [
        [(0, 4), (0, 4), (1, 4)],
        [(0, 4), (0, 4), (1, 4)],
        [(0, 3)],
    ]
    assert flat(ids_of(windows)) == list(range(27))


class Refilled:
    """Batches of two samples in one reused buffer."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        buffer = torch.zeros(2)
        for number in range(8):
            buffer.fill_(number)
            yield buffer, buffer


@pytest.mark.parametrize("counts", [((3, 1),), ()])
def test_a_loader_may_fill_one_buffer_again_and_again(counts: Any) -> None:
    seen = flat([window[1].tolist() for window in epoch(Refilled(), *counts)])
    assert seen == [number // 2 for number in range(16)]


# ---------------------------------------------------------------- loaders
class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(start, 11, step))


def collate(ids: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(ids).float(), torch.tensor(ids)


@pytest.mark.parametrize(("counts", "workers"), [((), 0), (((1, 2),), 2)])
def test_loaders_of_torch(counts: Any, workers: int) -> None:
    ids = torch.arange(11)
    for dataset, options in ((TensorDataset(ids.float(), ids), {}), (Stream(), {"collate_fn": collate})):
        loader = DataLoader(dataset, batch_size=3, num_workers=workers, **options)  # type: ignore[arg-type, var-annotated]
        for _ in range(2):
            assert sorted(flat(ids_of(epoch(loader, *counts)))) == list(range(11))


class Loader(list[Any]):
    """A list, which a thread may read, that tells how far it has been read, and can be made to fail."""

    def __init__(self, batches: list[Any], fail_at: int | None = None) -> None:
        super().__init__(batches)
        self.batches, self.fail_at = batches, fail_at
        self.asked = 0
        self.threads: list[str] = []
        self.read = threading.Condition()

    def __iter__(self) -> Iterator[Any]:
        self.threads.append(threading.current_thread().name)
        return self

    def __next__(self) -> Any:
        if self.asked == self.fail_at:
            raise OSError("disk")
        if self.asked == len(self.batches):
            raise StopIteration
        with self.read:
            self.asked += 1
            self.read.notify_all()
        return self.batches[self.asked - 1]

    def until(self, happened: Callable[[], bool]) -> None:
        with self.read:
            assert self.read.wait_for(happened, HANG_S)


@pytest.mark.parametrize("lanes", [LANES, CARDS])
def test_an_error_of_the_loader_comes_after_the_windows_before_it(lanes: Any) -> None:
    windows = iter(epoch(Loader(data(*[2] * 9), fail_at=5), (1, 1), lanes=lanes))
    assert [next(windows).samples for _ in range(2)] == [4, 4]
    with pytest.raises(OSError, match="disk"):
        next(windows)


@pytest.mark.parametrize("lanes", [LANES[:1], CARDS])
def test_a_batch_without_samples_is_an_error(lanes: Any) -> None:
    for bad in ((torch.ones(0),), ("text",), torch.tensor(1.0)):
        with pytest.raises(DataError, match="without samples"):
            list(epoch([bad], lanes=lanes))


def test_one_window_is_read_ahead_for_cards_and_no_more() -> None:
    loader = Loader(data(*[2] * 40))
    windows = iter(epoch(loader, (1, 1), lanes=CARDS))
    for number in range(1, 4):
        next(windows)
        loader.until(lambda number=number: loader.asked == 2 * (number + 1))  # type: ignore[misc]
    del windows
    assert loader.asked == 2 * (3 + 1)
    assert loader.threads[0] == threading.main_thread().name, "worker processes are started by the caller"


def test_an_epoch_that_is_left_ends_its_thread() -> None:
    def readers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("flowdp-loader")]

    loader = data(*[2] * 20)
    for _ in epoch(loader, (1, 1), lanes=CARDS):
        assert readers()
        break
    assert not readers()
    windows = iter(epoch(loader, (1, 1), lanes=CARDS))
    next(windows)
    assert readers()
    with pytest.raises(KeyError):
        windows.throw(KeyError)  # type: ignore[attr-defined]
    assert not readers()
    assert ids_of(epoch(Loader(data(2)))) == [[0, 1]], "and the next one goes its way"


@pytest.mark.parametrize("counts", [(), ((1, 2),)])
def test_the_code_of_a_dataset_runs_in_the_thread_of_the_loop(counts: Any) -> None:
    """The loop may read the same files at the same time, for example to evaluate."""
    threads = set()

    class Here(Dataset[int]):
        def __len__(self) -> int:
            return 11

        def __getitem__(self, index: int) -> int:
            threads.add(threading.current_thread())
            return index

    loader = DataLoader(Here(), batch_size=3, collate_fn=collate)
    assert sorted(flat(ids_of(epoch(loader, *counts, lanes=CARDS)))) == list(range(11))
    assert threads == {threading.main_thread()}


# ---------------------------------------------------------------- streams


def test_a_batch_that_is_computed_keeps_its_graph_on_its_way_to_a_card() -> None:
    weight = torch.ones(4, requires_grad=True)
    lanes = [StreamLane(torch.device("cpu", 0), Card()) for _ in range(2)]
    (window,) = epoch([(2 * weight, torch.arange(4))], (1, 1), lanes=lanes)
    for piece in window.pieces:
        piece.arrive()
    (torch.cat([piece.batch[0] for piece in window.pieces]) + window[0]).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0] * 4


def test_a_piece_on_an_accelerator_is_kept_for_the_stream_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnXpu, "recorded", [])
    lane = CardLane()
    ((piece,),) = (window.pieces for window in epoch([torch.rand(3).as_subclass(OnXpu)], lanes=[lane]))
    with lane.on(lane.comm):
        piece.arrive()
    assert OnXpu.recorded == [lane.compute, lane.comm]
