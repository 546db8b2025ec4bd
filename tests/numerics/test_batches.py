"""Tests of batches as users write them, through every public entry: samples and their parts stay together."""

from __future__ import annotations

from collections import Counter, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import Dataset

import flowdp
from flowdp import DataParallel, Run
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


@pytest.mark.parametrize(
    ("collate", "options"), list(zip((as_record, as_encoding, as_tuple), OPTIONS, strict=True))
)
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


def collate(items: list[int]) -> Item:
    x = numbers(len(items), 6)
    return Item(x, [f"{number:.6f}" for number in x[:, 0].tolist()])
