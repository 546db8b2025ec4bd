"""Tests of predict: outputs for a whole dataset in order, in evaluation mode, on any number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flowdp
from flowdp import DataError, DataParallel, FlowdpError, OptionError
from tests.loops import mlp, numbers

X = numbers(23, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.drop = nn.Dropout(0.9)

    def forward(self, x: Tensor) -> Any:
        assert not self.training
        assert not torch.is_grad_enabled()
        out = self.drop(self.inner(x))
        return {"out": out, "mean": out.mean(), "names": [f"{row[0]:.6f}" for row in x.tolist()]}


@pytest.fixture(params=[1, 2, 3])
def dp(request: pytest.FixtureRequest) -> Iterator[DataParallel]:
    with flowdp.setup(Model(), devices=["cpu"] * request.param) as made:
        yield made


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Tensor:
        return X[index]


@pytest.mark.parametrize(
    ("data", "batch_size"),
    [
        (X, None),
        (X, 5),
        (Rows(), 5),
        (DataLoader(Rows(), batch_size=5), None),
        (DataLoader(TensorDataset(X, torch.arange(len(X))), batch_size=5), None),
        ([{"x": X[:9]}, {"x": X[9:]}], None),
        ((batch for batch in X.split(7)), None),
    ],
    ids=["tensor", "cut", "dataset", "loader", "pairs", "mappings", "generator"],
)
def test_all_samples_in_their_order(data: Any, batch_size: int | None) -> None:
    model = Model()
    model.drop.train(False)
    for count in (1, 2):
        given = list(data) if hasattr(data, "__next__") else data
        data = given
        with flowdp.setup(model, devices=["cpu"] * count) as dp:
            found = dp.predict(given, batch_size)
        with torch.no_grad():
            wanted = model.eval().forward(X)
        torch.testing.assert_close(found["out"], wanted["out"])
        torch.testing.assert_close(found["mean"], wanted["mean"])
        assert found["names"] == wanted["names"]
        assert not found["out"].requires_grad


def test_modes_are_as_before(dp: DataParallel) -> None:
    dp.train()
    dp.module.drop.eval()  # type: ignore[union-attr]
    dp.predict(X, 10)
    assert dp.training
    assert not dp.module.drop.training  # type: ignore[union-attr]
    assert torch.is_grad_enabled()


def test_what_cannot_be_predicted_from(dp: DataParallel) -> None:
    with pytest.raises(OptionError, match="batch_size must be an int of at least 1"):
        dp.predict(X, 0)
    with pytest.raises(DataError, match="there is no batch"):
        dp.predict([])
    with pytest.raises(DataError, match=r"a batch has no samples \(0: 3\)"):
        dp.predict([[3]])


def test_numbers_over_batches_of_unequal_size() -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"mean": x.mean(), "count": torch.tensor(len(x))}

    for count in (1, 2):
        with flowdp.setup(Counting(), devices=["cpu"] * count, reduce={"count": "sum"}) as dp:
            found = dp.predict([X[:20], X[20:]])
        assert found["count"] == 23
        torch.testing.assert_close(found["mean"], X.mean())


# ---------------------------------------------------------------- models that are not trained
def test_a_model_without_an_optimizer_keeps_its_mode_and_does_not_step(dp: DataParallel) -> None:
    model = mlp().eval()
    with flowdp.setup(model, None, devices=["cpu", "cpu"]) as other:
        assert not model.training
        x = X.clone().requires_grad_()
        other(x).sum().backward()
        assert x.grad is not None, "gradients go through it"
        with pytest.raises(FlowdpError, match="no optimizer: give one to setup"):
            other.step()
        assert other.optimizers == ()
        assert sum(other.chunk_ratios) == pytest.approx(1.0)
        other.set_optimizer(SGD(model.parameters(), 0.1))
        other.step()


@pytest.mark.parametrize("model", [nn.ReLU(), mlp().requires_grad_(False)])
def test_models_without_anything_to_train(model: nn.Module) -> None:
    with flowdp.setup(model, devices=["cpu", "cpu"]) as dp:
        out = dp(X)
        assert not out.requires_grad
        torch.testing.assert_close(out, model(X))


class Vocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.vocab_size = 3

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def decode(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * 2
        return out


def test_the_wrapper_has_the_modules_attributes_and_methods() -> None:
    model = Vocabulary()
    with flowdp.setup(model, devices=["cpu", "cpu"]) as dp:
        assert dp.vocab_size == 3
        dp.vocab_size = 4
        assert model.vocab_size == 4
        torch.testing.assert_close(dp.decode(X), model.decode(X))  # on the first device alone
        torch.testing.assert_close(dp.call("decode", X), model.decode(X))
        dp.max_grad_norm = 1.0
        assert "max_grad_norm" not in vars(model)
