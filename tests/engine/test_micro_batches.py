"""Tests of the path from a step's batches to its micro-batches, and of retries after out of memory."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import flowdp
from flowdp import record_scalar
from flowdp.data.batches import Portion
from flowdp.data.epoch_order import EpochOrder
from flowdp.data.source import Feed
from flowdp.data.tensor_source import TensorSource
from flowdp.device.streams import HostLane
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.meter import Meter
from flowdp.engine.micro_batches import MicroBatch, MicroBatcher
from flowdp.errors import OutOfDeviceMemory
from flowdp.machine.worker import Step
from flowdp.protocol.messages import SampleRange
from flowdp.replica.replica import Replica
from tests.data.cards import Card, put_on_streams
from tests.limits import HANG_S
from tests.loops import numbers
from tests.parts import parts_of


class Slow(Feed):
    """Has a batch when the test allows it."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.there: set[int] = set()
        self.taken: list[int] = []
        self.followed: list[Any] = []

    def take(self, epoch: int, batch: int, part: SampleRange | None = None) -> Any:
        if batch not in self.there:
            return None
        self.taken.append(batch)
        return self.source.take(0, epoch, batch, part)

    def start(self, notify: Any) -> None: ...
    def follow(self, upcoming: Any) -> None:
        self.followed.append(upcoming)
        raise RuntimeError("the device is dead")

    def release(self) -> None: ...
    def wake(self, epoch: int, batch: int) -> None: ...
    def fit(self) -> None: ...
    def close(self) -> bool:
        return True


def batcher_of(feed: Any, source: Any, width: int) -> MicroBatcher:
    replica: Any = SimpleNamespace(width=width, module=nn.Linear(1, 1), function=None)
    unused: Any = None
    return MicroBatcher(feed, source, replica, unused, unused, unused)


def open_intake(width: int, samples: int = 11) -> tuple[MicroBatcher, Slow]:
    order = EpochOrder(samples, 2, 0, shuffle=False, drop_last=False)
    source = TensorSource([torch.arange(samples)], lambda parts: parts[0], order)
    feed = Slow(source)
    return batcher_of(feed, source, width), feed


def test_micro_batches_of_several() -> None:
    batcher, feed = open_intake(2)
    feed.there = set(range(6))
    step = Step(0, (0, 1, 2, 3, 4, 5), 0)
    micros = []
    while not batcher.is_last(step):
        micro = batcher.next(step)
        assert micro is not None
        micros.append((micro.batch.tolist(), micro.samples, micro.share))
    assert micros == [
        ([0, 1, 2, 3], 4, 4 / 12),
        ([4, 5, 6, 7], 4, 4 / 12),
        ([8, 9, 10], 3, 3 / 12),
    ]
    assert (batcher.samples, batcher.factor) == (11, 12 / 11)
    assert batcher.taken
    assert [(kept.batch.tolist(), kept.samples, kept.share) for kept in batcher.micros] == micros
    batcher.end(step)
    assert not batcher.taken
    assert not batcher.micros
    assert not batcher.is_last(step)


def test_it_goes_on_where_it_was() -> None:
    batcher, feed = open_intake(2)
    step = Step(0, (0, 1, 2), 0)
    feed.there = {0}
    assert batcher.next(step) is None
    assert (batcher.taken, batcher.samples) == (1, 0)
    assert batcher.next(step) is None
    feed.there = {1, 2}
    first, second = batcher.next(step), batcher.next(step)
    assert first is not None
    assert second is not None
    assert [first.batch.tolist(), second.batch.tolist()] == [[0, 1, 2, 3], [4, 5]]
    assert feed.taken == [0, 1, 2]
    assert batcher.is_last(step)


def test_the_feed_follows_each_plan_once_from_the_batch_that_is_next() -> None:
    batcher, feed = open_intake(1)
    feed.there = {0}
    batcher.next(Step(0, (0, 1), 0))
    machine: Any = SimpleNamespace(plans=1, upcoming=lambda: [(0, 0), (0, 1), (0, 2)])
    with pytest.raises(RuntimeError, match="the device is dead"):
        batcher.follow(machine)
    batcher.follow(machine)
    assert feed.followed == [[(0, 1), (0, 2)]]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_end_of_the_data_cuts_a_step_short(width: int) -> None:
    """The batches taken are trained, even if they are no whole micro-batch."""
    batcher, feed = open_intake(width)
    feed.there = {0, 1}
    trained: list[int] = []
    step = Step(0, (0, 1, 2, 3), 0)
    while (micro := batcher.next(step)) is not None:
        trained += micro.batch.tolist()
    cut = Step(0, (0, 1), 0)
    while not batcher.is_last(cut):
        micro = batcher.next(cut)
        assert micro is not None
        trained += micro.batch.tolist()
    assert trained == [0, 1, 2, 3]
    assert batcher.samples == 4


def test_a_part_is_a_portion_and_counts_for_itself() -> None:
    batcher, feed = open_intake(1)
    feed.there = {1}
    micro = batcher.next(Step(0, (1,), 0, part=SampleRange(1, 2)))
    assert micro is not None
    assert isinstance(micro.batch, Portion)
    assert micro.batch.rows(0, 1).tolist() == [3]
    assert (micro.samples, micro.share, batcher.factor) == (1, 1.0, 1.0)


class Keeping(TensorSource):
    """Records its calls."""

    def __init__(self, *given: Any, keeps: bool) -> None:
        super().__init__(*given)
        self.keeps = keeps
        self.told: list[Any] = []
        self.feed: Slow

    def settle(self, keys: Sequence[tuple[int, int]]) -> None:
        self.told.append(list(keys))

    def reclaim(self, rank: int) -> None:
        assert self.feed.followed == [()], "the feed may take it again"
        self.told.append(rank)


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_in_a_mean_is_settled(keeps: bool) -> None:
    order = EpochOrder(11, 2, 0, shuffle=False, drop_last=False)
    source = Keeping([torch.arange(11)], lambda parts: parts[0], order, keeps=keeps)
    feed = source.feed = Slow(source)
    feed.there = set(range(6))
    batcher = batcher_of(feed, source, 2)

    def train(*steps: Step) -> None:
        for step in steps:
            while not batcher.is_last(step):
                batcher.next(step)
            batcher.end(step)

    train(Step(0, (0, 1, 2), 0), Step(1, (3,), 1))
    batcher.settle()
    batcher.settle()  # a round without a step
    train(Step(1, (4,), 2))
    assert source.told == ([[(0, 0), (0, 1), (0, 2), (1, 3)]] if keeps else [])
    batcher.lose(7)
    assert source.told[keeps:] == [7]


# ---------------------------------------------------------------- out of memory
CPU = torch.device("cpu")
SAMPLES = 24
NUMBER = torch.arange(SAMPLES, dtype=torch.float64).unsqueeze(1)
X = torch.cat([NUMBER, numbers(SAMPLES, 5)], 1)
Y = numbers(SAMPLES, 3, seed=7)
SAID = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which "
    "12.00 MiB is free. Process 1 has 79.00 GiB memory in use."
)


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(SAID)


class FullBehind(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise full()


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0][:, 1:]), batch[1])


class Room:
    """A loss that runs out of memory above a number of samples, if one of these is among them.

    Args:
        samples: The most samples that fit.
        hungry: Samples whose forward needs more.
        behind: Samples whose backward needs more.

    Attributes:
        sizes: Samples of each forward that fitted.
        refused: Number of forwards that did not.
    """

    def __init__(self, samples: int, hungry: Set[int], behind: Set[int] = frozenset()) -> None:
        self.samples, self.hungry, self.behind = samples, hungry, behind
        self.sizes: list[int] = []
        self.refused = 0

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        loss = mse(model, batch)
        record_scalar("number", batch[0][:, 0].mean())
        record_scalar("host", float(len(batch[0])))
        there = set(batch[0][:, 0].long().tolist())
        if len(there) > self.samples and there & (self.hungry | self.behind):
            self.refused += 1
            if there & self.hungry:
                raise full()
            return FullBehind.apply(loss)
        self.sizes.append(len(batch[0]))
        return {"loss": loss, "said": loss.detach()}


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def train(loss: Any, **options: Any) -> tuple[dict[str, Tensor], flowdp.Run]:
    given: dict[str, Any] = {
        "model": mlp, "dataset": (X, Y), "per_device_batch_size": 4, "epochs": 2, "policy": "sync",
        "progress": False,
        "reading": flowdp.ReadingOptions(shuffle=False), "devices": ["cpu", "cpu"],
        "optimizer": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    } | options  # fmt: skip
    run = flowdp.Trainer(loss=loss, **given).start()
    return run.join().state_dict, run


def assert_trained_alike(room: Room, **options: Any) -> None:
    wanted, plain = train(Room(SAMPLES, set()), **options)
    found, run = train(room, **options)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-13)
    for mine, theirs in zip(run.history, plain.history, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-12)
        assert mine.scalars["number"] == pytest.approx(theirs.scalars["number"], rel=1e-12)
        assert mine.scalars["said"] == pytest.approx(theirs.scalars["said"], rel=1e-12)
    assert room.refused


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"per_device_batch_size": [4, 8]},
        {
            "policy": "exact",
            "batch_size": 12,
            "per_device_batch_size": 8,
            "runtime": flowdp.RuntimeOptions(partition_ratios=[0.5, 0.5]),
        },
    ],
    ids=["batches", "accumulation", "joined", "exact"],
)
def test_it_trains_what_it_would_have_trained(lanes: str, options: dict[str, Any]) -> None:
    """Both ranks run out of memory, one in forward, the other in backward."""
    room = Room(3, {6}, {1, 17})
    assert_trained_alike(room, **options)
    assert room.refused >= 2


def test_a_batch_is_halved_until_it_fits_and_stays_halved(caplog: pytest.LogCaptureFixture) -> None:
    room = Room(1, {5})
    with caplog.at_level(logging.WARNING, logger="flowdp"):
        assert_trained_alike(room, devices=["cpu"], per_device_batch_size=6, epochs=1)
    # The last sample of batch 0 is hungry: one piece of it fails, then two, then four, then there are six.
    assert room.sizes == [3, 1, 2, 1] + [1] * 24
    texts = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert len(texts) == 3
    for text, sizes in zip(texts, ["3 samples at a time instead of 6", "2 samples at a time instead of 3",
                                   "1 samples at a time instead of 2"], strict=True):  # fmt: skip
        assert sizes in text
        assert "rank 0 on cpu ran out of memory in epoch 1, at its step 1 (batch 1, indices 0, 1" in text


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "exact"])
def test_one_sample_that_has_no_room(policy: str) -> None:
    run = flowdp.Trainer(
        mlp,
        lambda params: torch.optim.SGD(params, 0.1),
        Room(0, {17}),
        dataset=(X, Y),
        per_device_batch_size=4,
        epochs=2,
        policy=policy,
        reading=flowdp.ReadingOptions(shuffle=False),
        devices=["cpu", "cpu"],
        progress=False,
    ).start()
    with pytest.raises(OutOfDeviceMemory, match="cannot be cut into more parts than 4") as caught:
        run.join(HANG_S)
    error = caught.value
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert "raise full()" in error.__cause__.__notes__[0]
    for part in (f"rank {error.rank} on cpu", "epoch 1", "batch_size=[...]", "gradient_accumulation_steps"):
        assert part in str(error)


class Hungry(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise full()


def no_cut(model: nn.Module, batch: Any) -> Tensor:
    raise full()


def own_step(worker: Any, batch: Any) -> None:
    raise full()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"loss": mse, "optimizer": lambda params: Hungry(params, 0.1)}, "cannot be done in pieces"),
        ({"train_step": own_step}, "cannot be done in pieces"),
        (
            {"loss": no_cut, "reading": flowdp.ReadingOptions(collate_fn=lambda items: {"n": len(items)})},
            "its 4 samples cannot be cut into more parts than 1",
        ),
    ],
    ids=["optimizer", "train_step", "no tensors"],
)
def test_what_is_not_tried_again(options: dict[str, Any], why: str) -> None:
    tried: list[int] = []
    dataset: Any = (X, Y) if "reading" not in options else TensorDataset(X, Y)
    given: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, 0.1)} | options
    for name in ("loss", "train_step"):
        if name in given:
            inner = given[name]
            given[name] = lambda *them, inner=inner: (tried.append(1), inner(*them))[1]
    run = flowdp.Trainer(
        mlp, dataset=dataset, batch_size=4, epochs=1, devices=["cpu"], progress=False, **given
    ).start()
    with pytest.raises(OutOfDeviceMemory, match=why) as caught:
        run.join(HANG_S)
    assert caught.value.rank == 0
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert len(tried) == 1


# ---------------------------------------------------------------- one rank alone
class Shrinking:
    """A feed.

    Attributes:
        has_more: Whether it holds batches ahead, which it can give up.
        shrunk: Number of calls.
    """

    has_more = False
    shrunk = 0

    def shrink(self) -> bool:
        self.shrunk += 1
        has_more, self.has_more = self.has_more, False
        return has_more


class Alone:
    """A replica with the objects that repeat its steps."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any]) -> None:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        self.replica = Replica(parts_of(module, optimizer), loss)
        self.meter, self.feed = Meter(HostLane(torch.device("cpu"))), Shrinking()
        self.current = CurrentWorker(0, CPU, module, sink=self.meter.scalar)
        source: Any = SimpleNamespace(samples_in=None)
        feed: Any = self.feed
        place = ErrorContext(self.current, source)
        self.batcher = MicroBatcher(feed, source, self.replica, self.current, self.meter, place)

    def step(self, *batches: Any) -> None:
        """A step as a worker does it."""
        self.replica.begin()
        for batch in batches:
            self.batcher.micros.append(MicroBatch(batch, len(batch[0]), 1 / len(batches)))
            self.batcher.add(self.batcher.micros[-1])
        self.replica.step()
        self.batcher.micros.clear()


class Counting(nn.Module):
    """Several kinds of buffers; one is a new object after every forward, one is never in flat memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(5).double()
        self.out = nn.Linear(5, 3).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.register_buffer("away", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0).detach()
        self.away += 1
        return self.out(self.norm(x))


def test_buffers_are_those_of_the_pieces_alone() -> None:
    """Batch norm sees each piece, as with gradient accumulation; failed forwards leave nothing."""
    mine = Alone(Counting(), Room(2, {2, 9}))
    mine.replica.module.away = torch.zeros(5)
    twin = Counting()
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    batches = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:12], Y[8:12])]
    for batch in batches:
        mine.step(batch)
        for part in zip(batch[0].split(2), batch[1].split(2), strict=True):
            (mse(twin, part) / 2).backward()
        plain.step()
        plain.zero_grad()
    assert mine.replica.pieces == 2
    assert mine.feed.shrunk == 1
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(mine.replica.module.state_dict()[name], tensor, rtol=1e-12, atol=1e-13)
    assert mine.replica.module.norm.num_batches_tracked == 6


def test_batches_ahead_give_their_memory_before_the_step_is_cut() -> None:
    tried: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tried.append(len(batch[0]))
        if len(tried) in refused:
            raise full()
        return mse(model, batch)

    for refused, pieces in (({1}, 1), ({1, 2}, 2), ({1, 2, 3}, 4)):
        tried.clear()
        mine = Alone(mlp(), loss)
        mine.feed.has_more = True
        mine.step((X[:4], Y[:4]))
        assert mine.replica.pieces == pieces
        assert mine.feed.shrunk == len(refused)
        assert tried[:2] == [4, 4]


@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_a_run_whose_ring_was_too_long_goes_on_with_whole_batches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: Any
) -> None:
    """Sample 21 lies in the last batch of an epoch: the ring has been sized by then."""
    card, failed = Card(), threading.Event()
    put_on_streams(card, monkeypatch.setattr)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[0]))
        if 21.0 in batch[0][:, 0].tolist() and not failed.is_set():
            failed.set()
            raise full()
        return mse(model, batch)

    states = []
    for _ in range(2):
        sizes: list[int] = []
        options = {"batch_size": 4} if policy == "exact" else {}
        state, _ = train(
            loss, dataset=list(zip(X, Y, strict=True)), devices=["cpu"], policy=policy, epochs=3, **options
        )
        states.append(state)
        assert set(sizes) == {4}
    assert len([record for record in caplog.records if "give theirs up" in record.getMessage()]) == 1
    for name, tensor in states[1].items():
        assert torch.equal(states[0][name], tensor)
    assert not card.races


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("behind", [False, True])
def test_nothing_of_the_failed_forward_is_held_while_it_is_repeated(no_collector: None, behind: bool) -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    room = Room(1, set() if behind else {1}, {1})

    def inner(model: nn.Module, batch: Any) -> Tensor:
        hidden = model(batch[0][:, 1:])
        held.append(weakref.ref(hidden))
        value = room(model, batch)
        return (value["loss"] if isinstance(value, dict) else value) + 0 * hidden.sum()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in held))
        try:
            return inner(model, batch)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError("wrapped") from error

    mine = Alone(mlp(), loss)
    batch = (X[:2].clone(), Y[:2].clone())
    rows = weakref.ref(batch[0])
    mine.step(batch)
    assert len(alive) == 3
    assert alive[1] == 0
    del batch
    assert rows() is None, "the batch outlives its step"
