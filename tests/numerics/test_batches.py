"""Tests of batches as users write them, through every public entry: samples and their parts stay together."""

from __future__ import annotations

import logging
from collections import Counter, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

import flowdp
from flowdp import DataParallel, FlowdpError, Run
from tests.loops import assert_equal, gradients, mlp, numbers


# ---------------------------------------------------------------- a Trainer
class Words(Dataset[Any]):
    """A number, and the same number as words and in other forms."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> int:
        return index


@dataclass
class Batch:
    x: Tensor
    texts: list[str]
    ids: tuple[int, ...]
    rows: Any
    tokens: list[list[int]]


class Encoding(UserDict[str, Any]):
    """Like transformers' BatchEncoding."""

    def to(self, device: object) -> Encoding:
        raise AssertionError("its tensors are moved one by one")


def fields(items: list[int]) -> dict[str, Any]:
    return {
        "x": torch.tensor(items, dtype=torch.float32)[:, None],
        "texts": [str(item) for item in items],
        "ids": tuple(items),
        "rows": np.array(items),
        "tokens": [[item] * (item % 3) for item in items],
    }


def as_record(items: list[int]) -> Batch:
    return Batch(**fields(items))


def as_encoding(items: list[int]) -> Encoding:
    return Encoding(fields(items))


def as_tuple(items: list[int]) -> Any:
    return tuple(fields(items).values())


def seen_by(run: Callable[[Callable[..., Tensor]], Run]) -> Counter[int]:
    """Run a Trainer; returns how often each sample was trained, after checks of each batch."""
    seen: Counter[int] = Counter()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        parts = (
            list(batch) if isinstance(batch, tuple) else [batch["x"]] if isinstance(batch, UserDict) else []
        )
        x, texts, ids, rows, tokens = (
            parts
            if len(parts) == 5
            else [
                batch[name] if isinstance(batch, UserDict) else getattr(batch, name)
                for name in ("x", "texts", "ids", "rows", "tokens")
            ]
        )
        numbers = [int(number) for number in x[:, 0]]
        assert numbers == [int(text) for text in texts] == list(ids) == rows.tolist()
        assert tokens == [[number] * (number % 3) for number in numbers]
        out: Tensor = model(x).mean()
        seen.update(numbers)
        return out

    run(loss).join()
    return seen


FORMS = pytest.mark.parametrize("collate", [as_record, as_encoding, as_tuple])
OPTIONS: list[dict[str, Any]] = [
    {
        "policy": "exact",
        "batch_size": 16,
        "per_device_batch_size": 4,
        "runtime": flowdp.RuntimeOptions(partition_ratios=(0.75, 0.25)),
    },
    {"policy": "sync", "per_device_batch_size": [8, 4]},
    {
        "policy": "sync",
        "per_device_batch_size": 8,
        "num_workers": 1,
        "on_failure": "continue",
    },
]


@FORMS
@pytest.mark.parametrize("options", OPTIONS, ids=["exact", "sizes", "processes"])
def test_what_is_no_tensor_stays_beside_its_sample(
    collate: Callable[[list[int]], Any], options: dict[str, Any]
) -> None:
    num_workers, on_failure = options.get("num_workers"), options.get("on_failure", "raise")
    rest = {name: value for name, value in options.items() if name not in ("num_workers", "on_failure")}

    def run(loss: Callable[..., Tensor]) -> Run:
        return flowdp.Trainer(
            model=lambda: nn.Linear(1, 1),
            optimizer=lambda params: SGD(params, 1e-6),
            loss=loss,
            dataset=Words(),
            reading=flowdp.ReadingOptions(collate_fn=collate, num_workers=num_workers),
            epochs=1,
            devices=["cpu", "cpu"],
            progress=False,
            failures=flowdp.FailureOptions(on_failure=on_failure, check_loss=False),
            **rest,
        ).start()

    assert seen_by(run) == dict.fromkeys(range(48), 1)


def test_after_an_out_of_memory_error_the_pieces_stay_aligned() -> None:
    def run(loss: Callable[..., Tensor]) -> Run:
        def hungry(model: nn.Module, batch: Batch) -> Tensor:
            if len(batch.x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")
            return loss(model, batch)

        return flowdp.Trainer(
            model=lambda: nn.Linear(1, 1),
            optimizer=lambda params: SGD(params, 1e-6),
            loss=hungry,
            dataset=Words(),
            reading=flowdp.ReadingOptions(collate_fn=as_record),
            batch_size=16,
            epochs=1,
            devices=["cpu"],
            progress=False,
        ).start()

    assert seen_by(run) == dict.fromkeys(range(48), 1)


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_samples_in_a_class_that_is_not_known_are_not_cut_in_silence() -> None:
    trainer = flowdp.Trainer(
        model=lambda: nn.Linear(1, 1),
        optimizer=lambda params: SGD(params, 0.1),
        loss=lambda model, batch: model(batch[0]).mean(),
        dataset=Words(),
        reading=flowdp.ReadingOptions(
            collate_fn=lambda items: (torch.ones(len(items), 1), Opaque(torch.ones(len(items), 1)))
        ),
        policy="exact",
        per_device_batch_size=4,
        batch_size=16,
        epochs=1,
        devices=["cpu", "cpu"],
        progress=False,
    )
    with pytest.raises(FlowdpError, match="class Opaque holds a tensor that is as long as the batch"):
        trainer.fit()


def test_values_that_differ_between_the_batches_of_a_step_are_not_dropped() -> None:
    trainer = flowdp.Trainer(
        model=lambda: nn.Linear(1, 1),
        optimizer=lambda params: SGD(params, 0.1),
        loss=lambda model, batch: model(batch["x"]).mean(),
        dataset=Words(),
        reading=flowdp.ReadingOptions(
            collate_fn=lambda items: {"x": torch.ones(len(items), 1), "longest": max(items)}
        ),
        policy="sync",
        per_device_batch_size=[8, 4],
        epochs=1,
        devices=["cpu", "cpu"],
        progress=False,
    )
    with pytest.raises(FlowdpError, match=r"batch\['longest'\] .*differs between batches that make one step"):
        trainer.fit()


# ---------------------------------------------------------------- setup
@pytest.fixture
def made() -> Iterator[list[DataParallel]]:
    made: list[DataParallel] = []
    yield made
    for dp in made:
        dp.close()


def setup(made: list[DataParallel], model: nn.Module, **options: Any) -> DataParallel:
    made.append(
        flowdp.setup(
            model, SGD(model.parameters(), 0.1), devices=["cpu", "cpu"], **{"cadence": False, **options}
        )
    )
    return made[-1]


@dataclass(frozen=True)
class Item:
    x: Tensor
    texts: list[str]


@dataclass
class Result:
    out: Tensor
    texts: list[str]
    state: Any


class Elaborate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, item: Any, labels: list[str], size: tuple[int, int] = (9, 9)) -> Any:
        x, texts = (item["x"], item["texts"]) if isinstance(item, UserDict) else (item.x, item.texts)
        assert texts == labels == [f"{number:.6f}" for number in x[:, 0].tolist()]
        Out = namedtuple("Out", "hidden rows")
        out = self.inner(x)
        return Result(out, texts, Out(out * 2, x.detach().numpy()))


@pytest.mark.parametrize("form", [Item, Encoding])
def test_records_mappings_and_lists_go_in_and_come_out(made: list[DataParallel], form: Any) -> None:
    model, twin = Elaborate(), Elaborate()
    dp = setup(made, model)
    x = numbers(9, 6)
    texts = [f"{number:.6f}" for number in x[:, 0].tolist()]
    item = Item(x, texts) if form is Item else Encoding({"x": x, "texts": texts})
    results = []
    for call in (dp, twin):
        found = call(item, texts)
        (found.out.sin().sum() + found.state.hidden.sum()).backward()
        results.append(found)
    mine, other = results
    assert dp.shard_sizes == (5, 4)
    assert_equal([mine.out, mine.state.hidden], [other.out, other.state.hidden])
    assert_equal(gradients(model), gradients(twin))
    assert mine.texts == other.texts == texts
    assert np.array_equal(mine.state.rows, other.state.rows)


class Texts(nn.Module):
    """A model that makes its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)
        self.calls: list[int] = []

    def forward(self, texts: list[str]) -> Any:
        return self.table(torch.tensor([int(text) for text in texts])), [text * 2 for text in texts]


def test_a_list_of_texts_alone_is_the_batch(made: list[DataParallel]) -> None:
    dp = setup(made, Texts())
    out, texts = dp(["1", "2", "3"])
    assert dp.shard_sizes == (2, 1)
    assert texts == ["11", "22", "33"]
    assert torch.equal(out, dp.module.table.weight[1:4])  # type: ignore[union-attr]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, graph: Any, *rest: Any) -> Tensor:
        out: Tensor = self.inner(graph.x if isinstance(graph, Opaque) else torch.ones(3, 2))
        return out


def test_what_the_first_device_does_alone_is_said_once(
    made: list[DataParallel], caplog: pytest.LogCaptureFixture
) -> None:
    dp = setup(made, Whole())
    with caplog.at_level(logging.WARNING, "flowdp"):
        for _ in range(2):
            dp(Opaque(torch.ones(4, 2)), 3).sum().backward()
    (record,) = caplog.records
    assert (
        "nothing in a call can be cut (0: Opaque, 1: 3), so cpu does such calls alone" in record.getMessage()
    )
    assert dp.shard_sizes == (0, 0)
    assert dp.module.inner.bias.grad.item() == 8.0, "4 samples, twice, on one device"  # type: ignore[union-attr]


def test_samples_beside_the_batch_in_a_class_that_is_not_known_are_refused(made: list[DataParallel]) -> None:
    """They go whole to all devices, and the comparison sees it."""
    dp = setup(made, Whole())
    packed = pack_padded_sequence(torch.ones(3, 4, 2), torch.tensor([3, 3, 2, 1]))
    for given in (Opaque(torch.ones(4, 2)), packed):
        with pytest.raises(FlowdpError, match="gives another result when the batch is cut"):
            dp(given, torch.ones(4))


def collate(items: list[int]) -> Item:
    x = numbers(len(items), 6)
    return Item(x, [f"{number:.6f}" for number in x[:, 0].tolist()])


@pytest.mark.parametrize("cadence", [False, True])
def test_windows_of_records(made: list[DataParallel], cadence: bool) -> None:
    samples = 0

    def loss(context: flowdp.LossContext) -> Tensor:
        item = context.batch
        assert item.texts == [f"{number:.6f}" for number in item.x[:, 0].tolist()]
        return context.output.pow(2).mean()

    dp = setup(made, mlp(), cadence=cadence, loss_fn=loss, inputs="x")
    for window in dp.epoch(DataLoader(Words(), batch_size=16, collate_fn=collate)):
        dp.forward_batch(window)
        assert len(window["texts"]) == window.samples
        samples += window.samples
        dp.step()
    assert samples == 48


def test_a_window_that_cannot_be_cut(made: list[DataParallel]) -> None:
    dp = setup(made, Whole())
    batches = [(torch.ones(4, 2), Opaque(torch.ones(4)))]
    (window,) = dp.epoch(batches)
    with pytest.raises(FlowdpError, match="forward_batch gives another result when the batch is cut"):
        dp.forward_batch(window)
