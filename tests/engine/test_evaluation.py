"""Tests of evaluations, with worker threads made by the test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flowdp.data.epoch_order import Stride
from flowdp.device import worker_context
from flowdp.device.streams import Lane, StreamLane
from flowdp.device.worker_context import CurrentWorker, record_scalar
from flowdp.engine.evaluation import Evaluator
from flowdp.engine.shared_batches import to_lane
from flowdp.errors import DataError
from flowdp.policy.tally import evaluation_means
from flowdp.protocol.messages import Evaluation
from flowdp.replica.loss import loss_function
from flowdp.replica.replica import Replica
from tests.data.opening import evaluated
from tests.fakes import FakeCuda
from tests.limits import HANG_S
from tests.parts import parts_of

CPU = torch.device("cpu")
torch.manual_seed(3)
X, Y = torch.randn(23, 2), torch.randn(23, 1)
BATCHES = 5  # of 5, 5, 5, 5 and 3 samples


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def errors(model: nn.Module, batch: Any) -> dict[str, Any]:
    difference = model(batch[0]) - batch[1]
    return {"square": difference.square().mean(), "size": float(difference.abs().mean())}


def replica(
    loss: Callable[..., Any] | nn.Module = mse, module: nn.Module | None = None, **options: Any
) -> Replica:
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return Replica(parts_of(module, optimizer, **options), loss_function(loss, CPU))


def worker(own: Replica, rank: int = 0) -> CurrentWorker:
    def sink(*recorded: object) -> None:
        raise AssertionError(f"{recorded} counts towards the epoch")

    return CurrentWorker(rank, CPU, own.module, samples=77, sink=sink)


class Ranks:
    """Threads that evaluate, each with an inbox; and the copies of each."""

    def __init__(self, dataset: object, *given: Any, ranks: int = 1, **options: Any) -> None:
        source = evaluated(dataset, **{"batch_size": 5, "takers": ranks, **options})
        self.evaluator = Evaluator(source, *given)
        self.inboxes: list[queue.SimpleQueue[bool]] = [queue.SimpleQueue() for _ in range(ranks)]
        self.failed: queue.SimpleQueue[DataError] = queue.SimpleQueue()
        self.moved = [0] * ranks
        self.number = 0  # of the evaluation
        self.waits: queue.SimpleQueue[int] = queue.SimpleQueue()  # copies so far
        self.evaluator.batches.start(
            wake=lambda rank, *_: self.inboxes[rank].put(True), failed=self.failed.put
        )
        assert not any(thread.is_alive() for thread in self.evaluator.source.threads())

    def rank(self, rank: int, own: Replica) -> tuple[Evaluation, ...]:
        def wait() -> bool:
            self.waits.put(self.moved[rank])
            return self.inboxes[rank].get(timeout=HANG_S)

        def moved() -> None:
            self.moved[rank] += 1

        worker_context.bind(worker(own, rank))
        try:
            return self.evaluator.run(rank, own, self.number, wait, moved).results
        finally:
            now = worker_context.current_worker()
            assert now.samples == 77
            with pytest.raises(AssertionError, match="counts towards the epoch"):
                now.record("a", 1.0)
            del worker_context._local.worker

    def run(self, *replicas: Replica) -> list[tuple[Evaluation, ...]]:
        """One evaluation."""
        with ThreadPoolExecutor(len(self.inboxes)) as pool:
            results = list(pool.map(self.rank, range(len(self.inboxes)), replicas))
        self.number += 1
        return results


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*given: Any, **options: Any) -> Ranks:
        made.append(Ranks(*given, **options))
        return made[-1]

    yield make
    for one in made:
        assert one.evaluator.source.close()


def means(results: list[tuple[Evaluation, ...]]) -> dict[str, float]:
    rows: Any = [row for of_rank in results for row in of_rank]
    return evaluation_means(rows)


# ---------------------------------------------------------------- the batches of each rank
@pytest.mark.parametrize(
    ("dataset", "num_workers"),
    [
        ((X, Y), 0),
        (Pairs(), 0),
        (Pairs(), 2),
        (Stream(), 0),
        (Stream(), 1),
        (DataLoader(Pairs(), 5, shuffle=True), None),
    ],
    ids=["tensors", "map", "processes", "stream", "stream of a process", "loader"],
)
def test_each_sample_is_evaluated_once_and_the_means_are_those_of_one_rank(
    ranks: Any, dataset: object, num_workers: int | None
) -> None:
    models = [replica() for _ in range(3)]
    model = models[0].module
    model.eval()
    with torch.no_grad():
        expected = errors(model, (X, Y))
    model.train()
    alone = ranks(dataset, errors, num_workers=num_workers).run(models[0])
    many = ranks(dataset, errors, num_workers=num_workers, ranks=3)
    for evaluation in range(2):
        results = many.run(*models)
        rows = sorted(row for of_rank in results for row in of_rank)
        assert [row[:2] for row in rows] == [(0, 5), (1, 5), (2, 5), (3, 5), (4, 3)]
        assert sum(many.moved) == BATCHES * (evaluation + 1)
        if not isinstance(dataset, DataLoader):
            assert means(results) == means(alone)  # bit for bit
        assert means(results)["square"] == pytest.approx(expected["square"].item(), rel=1e-6)
        assert means(results)["size"] == pytest.approx(expected["size"], rel=1e-6)


@pytest.mark.parametrize("machines", [2, 7])
@pytest.mark.parametrize(
    ("dataset", "num_workers"),
    [((X, Y), 0), (Pairs(), 2), (Stream(), 1)],
    ids=["tensors", "processes", "stream of a process"],
)
def test_of_several_machines_each_evaluates_its_batches_and_the_means_are_those_of_one(
    ranks: Any, dataset: object, num_workers: int, machines: int
) -> None:
    own, other = replica(), replica()
    expected = ranks(dataset, errors, num_workers=num_workers).run(own)
    for evaluation in range(2):
        results: list[tuple[Evaluation, ...]] = []
        for machine in range(machines):
            options = {"num_workers": num_workers, "stride": Stride(machine, machines)}
            one = ranks(dataset, errors, ranks=2, **options)
            for _ in range(evaluation):
                one.run(own, other)
            of_machine = one.run(own, other)
            numbers = sorted(row[0] for of_rank in of_machine for row in of_rank)
            assert numbers == list(range(machine, BATCHES, machines))
            results += of_machine
        assert means(results) == means(expected)  # bit for bit
        assert sum(row[1] for of_rank in results for row in of_rank) == 23


def test_the_order_of_the_training_is_not_touched(ranks: Any) -> None:
    own = replica()
    before = torch.get_rng_state()
    ranks(DataLoader(Pairs(), 5, shuffle=True, num_workers=1), errors).run(own)
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- ended early
class Held(Pairs):
    """Yields the first batch, and the others when released."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        assert index < 5 or self.may.wait(HANG_S)
        return super().__getitem__(index)


def test_a_cut_ends_the_waiting_and_every_later_evaluation(ranks: Any) -> None:
    dataset = Held()
    one = ranks(dataset, errors)
    models = replica()
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(one.rank, 0, models)
        while one.waits.get(timeout=HANG_S) < 1:
            pass
        one.evaluator.batches.cut()
        assert [row[0] for row in result.result(10)] == [0]
        assert pool.submit(one.rank, 0, models).result(10) == ()
    assert one.inboxes[0].empty()
    dataset.may.set()


class Merging(nn.Linear):
    """Adds to its weight for evaluation, and subtracts again for training."""

    is_merged = False

    def train(self, mode: bool = True) -> Merging:
        if self.is_merged is mode:
            with torch.no_grad():
                self.weight.add_(-1.0 if mode else 1.0)
            self.is_merged = not mode
        super().train(mode)
        return self


class Stubborn(nn.Dropout):
    """Cannot be set to training mode, but was in it."""

    def train(self, mode: bool = True) -> Stubborn:
        super().train(False)
        return self


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(0.5)))
        self.rest = nn.Sequential(Merging(2, 1), Stubborn(0.5))
        self.frozen.eval()
        self.frozen[1].train()  # only itself and its first child are not frozen

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.frozen(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("fails", [False, True])
def test_every_submodule_has_its_mode_again(ranks: Any, fails: bool) -> None:
    own = replica(module=Nested())
    modes = {name: part.training for name, part in own.module.named_modules()}
    assert len(set(modes.values())) == 2
    weight = own.module.rest[0].weight.clone()

    def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert not any(part.training for part in model.modules())
        assert not torch.is_grad_enabled()
        assert torch.allclose(model.rest[0].weight, weight + 1)
        if fails:
            raise KeyError("label")
        return {"y": model(batch[0]).mean()}

    one = ranks((X, Y), step)
    if fails:
        with pytest.raises(KeyError):
            one.run(own)
    else:
        one.run(own)
    assert {name: part.training for name, part in own.module.named_modules()} == modes
    assert torch.allclose(own.module.rest[0].weight, weight)
    assert own.module.frozen[0].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (mse, ["loss"]),
        (nn.MSELoss(), ["loss"]),
        (lambda model, batch: mse(model, batch).reshape(1, 1), ["loss"]),
        (lambda model, batch: (mse(model, batch), {"a": 2.0}), ["a", "loss"]),
        (lambda model, batch: {"loss": mse(model, batch), "a": torch.tensor(2.0)}, ["a", "loss"]),
    ],
)
def test_without_a_step_the_loss_is_evaluated(ranks: Any, loss: Any, names: list[str]) -> None:
    own = replica(loss)
    found = means(ranks((X, Y)).run(own))
    own.module.eval()
    assert sorted(found) == names
    assert found["loss"] == pytest.approx(mse(own.module, (X, Y)).item(), rel=1e-6)
    assert found.get("a", 2.0) == 2.0


def test_a_loss_counts_for_the_weight_that_it_names(ranks: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        first = batch[0][0, 0]
        return {"loss": first, "weight": torch.where(first > 0, 3.0, 1.0), "first": first}

    firsts = [X[i, 0].item() for i in range(0, 23, 5)]
    found = means(ranks((X, Y)).run(replica(loss)))
    sizes = [5, 5, 5, 5, 3]
    weights = [3.0 if first > 0 else 1.0 for first in firsts]
    assert len(set(weights)) == 2
    by = sum(first * weight for first, weight in zip(firsts, weights, strict=True)) / sum(weights)
    assert found["loss"] == pytest.approx(by)
    assert found["first"] == pytest.approx(sum(f * s for f, s in zip(firsts, sizes, strict=True)) / 23)
    assert "weight" not in found


def test_what_is_recorded_counts_towards_the_evaluation(ranks: Any) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        record_scalar("rows", len(batch[0]))
        record_scalar("first", batch[0][0, 0], weight=2 if len(batch[0]) == 5 else 8)
        return {}

    found = means(ranks((X, Y), step).run(replica()))
    assert found["rows"] == pytest.approx((20 * 5 + 3 * 3) / 23)
    assert found["first"] == pytest.approx(
        sum(X[i, 0].item() * (2, 8)[i == 20] for i in range(0, 23, 5)) / 16
    )


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("dataset", "note"),
    [
        ((X, Y), "in batch 2 (samples 10, 11, 12, 13, 14, 15, 16, 17, ...) of the evaluation"),
        (Stream(), "in batch 2 of the evaluation"),
    ],
)
def test_an_error_of_the_step_names_its_batch(ranks: Any, dataset: object, note: str) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        if torch.equal(batch[0][0], X[10]):
            raise ZeroDivisionError("of mine")
        return {}

    with pytest.raises(ZeroDivisionError, match="of mine") as caught:
        ranks(dataset, step, batch_size=10).run(replica())
    assert caught.value.__notes__ == [note]


def test_a_dataset_that_fails_is_heard_of_by_all(ranks: Any) -> None:
    class Broken(Pairs):
        def __getitem__(self, index: int) -> Any:
            if index == 12:
                raise KeyError("label")
            return super().__getitem__(index)

    many = ranks(Broken(), errors, ranks=2)
    models = [replica(), replica()]
    with ThreadPoolExecutor(2) as pool:
        for result in [pool.submit(many.rank, rank, models[rank]) for rank in (0, 1)]:
            with pytest.raises(DataError, match="batch 3 of epoch 1"):
                result.result(10)
    assert many.failed.get(timeout=HANG_S).epoch == 0


# ---------------------------------------------------------------- on a card
class Far(Tensor):
    """A tensor on another card, as far as can be seen here."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xpu", 1)

    def record_stream(self, stream: Any) -> None:
        kept.append(stream.name)


kept: list[str] = []


class Boxed:
    """An object that moves itself."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def to(self, device: torch.device) -> Boxed:
        return self


@pytest.mark.parametrize("leaf", [X.as_subclass(Far), Boxed(X.as_subclass(Far))], ids=["tensor", "object"])
def test_what_a_dataset_makes_on_a_card_is_waited_for_and_kept_until_compute_has_read_it(leaf: Any) -> None:
    cuda = FakeCuda()
    lane: Lane = StreamLane(CPU, cuda)
    waited = lambda: [who for who, verb, _ in cuda.log if verb == "waits for"]  # noqa: E731
    kept.clear()
    assert to_lane(X, lane) is X
    assert not waited()
    assert to_lane(leaf, lane) is leaf
    assert waited() == kept == [lane.compute.name]  # type: ignore[attr-defined]
    assert to_lane("name", lane) == "name"
