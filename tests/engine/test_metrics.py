"""Tests of metrics with a state: those of all ranks together equal one that saw every batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flowdp import EvaluationOptions, Trainer, current_worker
from flowdp.engine import metrics
from flowdp.engine.metrics import MetricPool, RankMetrics, States
from tests.limits import HANG_S

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import classification, regression, wrappers  # noqa: E402

torch.manual_seed(5)
X, Y = torch.randn(52, 4), torch.randint(0, 3, (52,))


class Net(nn.Module):
    """A classifier with its metrics; not trained, so that their values are known."""

    def __init__(self, **metrics: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def evaluated(model: Net, eval_step: Callable[..., Any] | None, epochs: int = 1, **options: Any) -> list[Any]:
    return [dict(record.eval) for record in records(model, eval_step, epochs, **options)]


def records(model: Net, eval_step: Callable[..., Any] | None, epochs: int = 1, **options: Any) -> list[Any]:
    run = Trainer(
        model,
        lambda params: torch.optim.SGD(params, 0.0),
        options.pop("loss", lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
        dataset=(X, Y),
        evaluation=EvaluationOptions((X, Y), step=eval_step, sanity_check=0),
        per_device_batch_size=8,
        epochs=epochs,
        **{"devices": 2, "policy": "sync", **options},
    ).start()
    return list(run.join().history)


def together(step: Callable[..., Any], ranks: int) -> Callable[..., Any]:
    """A step whose first call on each rank waits for those of the others, so that all evaluate a batch."""
    meeting, seen = threading.Barrier(ranks), set()

    @wraps(step)
    def wrapped(*given: Any, **metrics: Any) -> Any:
        if (rank := current_worker().rank) not in seen:
            seen.add(rank)
            meeting.wait(HANG_S)
        return step(*given, **metrics)

    return wrapped


class MeanOfMeans(torchmetrics.Metric):
    """A state that is a mean over updates."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, logits: Any, labels: Any) -> None:
        count = self._update_count
        self.mean = (self.mean * (count - 1) + logits.mean()) / count

    def compute(self) -> Any:
        return self.mean


class Nested(torchmetrics.Metric):
    """A metric with states, and an inner metric that its `reset` leaves unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = classification.MulticlassF1Score(3, average="macro")
        self.kind: str | None = None
        self.add_state("samples", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Any, labels: Any) -> None:
        self.f1.update(logits, labels)
        self.kind = "known with the first batch"
        self.samples = self.samples + len(labels)

    def compute(self) -> Any:
        return self.f1.compute() + self.samples


def doubled() -> Any:
    base = classification.MulticlassF1Score(3, average="macro")
    return wrappers.LambdaInputTransformer(base, transform_pred=lambda logits: logits * logits)


METRICS: dict[str, Callable[[], Any]] = {
    "sums": lambda: classification.MulticlassF1Score(3, average="macro"),
    "lists": lambda: classification.MulticlassAUROC(3),
    "mean": MeanOfMeans,
    "composed": lambda: classification.MulticlassPrecision(3) + classification.MulticlassRecall(3),
    "nested": Nested,
    "transformed": doubled,
    "composed of wrapped ones": lambda: doubled() + classification.MulticlassRecall(3),
}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_value_is_that_of_all_samples(kind: str, ranks: int) -> None:
    model = Net(metric=METRICS[kind]())
    expected = copy.deepcopy(model.metric)
    for rows in zip(X.split(8), Y.split(8), strict=True):
        with torch.no_grad():
            expected.update(model(rows[0]), rows[1])

    def step(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        model.metric.update(logits, batch[1])
        return {"metric": model.metric, "loss": F.cross_entropy(logits, batch[1])}

    history = evaluated(model, together(step, ranks), epochs=2, devices=ranks)
    for means in history:  # the second one begins anew
        assert means["metric"] == pytest.approx(expected.compute().item(), rel=1e-5)
    assert history[0]["loss"] == pytest.approx(F.cross_entropy(model(X), Y).item(), rel=1e-5)


def test_states_that_are_not_reduced_are_stacked() -> None:
    """Pearson's states are merged by its `compute`, which needs one row per rank with data."""
    expected = regression.PearsonCorrCoef()
    expected.update(X[:, 0], X[:, 0] + X[:, 1])

    def step(model: Any, batch: Any) -> Any:
        model.pearson.update(batch[0][:, 0], batch[0][:, 0] + batch[0][:, 1])
        return {"pearson": model.pearson}

    history = evaluated(Net(pearson=regression.PearsonCorrCoef()), together(step, 2), devices=2)
    assert history[0]["pearson"] == pytest.approx(expected.compute().item(), rel=1e-4)


def test_a_collection_is_its_metrics_by_their_names() -> None:
    def collection() -> Any:
        both = [classification.MulticlassPrecision(3), classification.MulticlassRecall(3)]
        return torchmetrics.MetricCollection(both, prefix="val_")

    model = Net(metrics=collection())
    expected = collection()
    expected.update(model(X), Y)

    def step(model: Any, batch: Any) -> Any:
        model.metrics.update(model(batch[0]), batch[1])
        return model.metrics

    values = {name: value.item() for name, value in expected.compute().items()}
    for means in evaluated(model, together(step, 2), epochs=2):
        assert means == pytest.approx(values, rel=1e-5)


def test_a_metric_for_each_rank_may_lie_beside_the_model() -> None:
    own = [classification.MulticlassF1Score(3, average="macro") for _ in range(2)]
    model = Net()
    expected = classification.MulticlassF1Score(3, average="macro")
    expected.update(model(X), Y)

    def step(model: Any, batch: Any) -> Any:
        metric = own[current_worker().rank]
        metric.update(model(batch[0]), batch[1])
        return {"f1": metric}

    assert evaluated(model, together(step, 2))[0]["f1"] == pytest.approx(expected.compute().item(), rel=1e-5)


# ---------------------------------------------------------------- refusals


KINDS: dict[str, Callable[[], Any]] = {
    "each": lambda: classification.MulticlassF1Score(3, average=None),
    "named": lambda: wrappers.ClasswiseWrapper(classification.MulticlassF1Score(3, average=None)),
    "roc": lambda: classification.BinaryROC(thresholds=4),
    "confusion": lambda: classification.MulticlassConfusionMatrix(3),
}


def update_kinds(metrics: Any, logits: Any, labels: Any) -> None:
    for name, metric in metrics.items():
        given = (logits.softmax(1)[:, 0], (labels > 0).long()) if name == "roc" else (logits, labels)
        metric.update(*given)


def step_of_kinds(model: Any, batch: Any, metrics: Any) -> None:
    update_kinds(metrics, model(batch[0]), batch[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_values_of_several_numbers(ranks: int) -> None:
    """Several elements are an array; those of a mapping and a tuple are values of their own."""
    given, plain = ({name: make() for name, make in KINDS.items()} for _ in range(2))
    model = Net()
    update_kinds(plain, model(X), Y)
    values = {name: metric.compute() for name, metric in plain.items()}
    arrays = {
        "each": values["each"],
        "confusion": values["confusion"],
        **{f"roc/{place}": value for place, value in enumerate(values["roc"])},
    }
    options = {"devices": ranks, "metrics": given}
    for record in records(model, together(step_of_kinds, ranks), epochs=2, **options):
        assert record.eval == pytest.approx({f"named/{key}": v.item() for key, v in values["named"].items()})
        assert record.eval_arrays.keys() == arrays.keys()
        for name, value in arrays.items():
            assert torch.tensor(record.eval_arrays[name].tolist()).numpy() == pytest.approx(value.numpy())


# ---------------------------------------------------------------- metrics of the Trainer


def test_arrays_are_in_checkpoints(tmp_path: Any) -> None:
    given = {"confusion": classification.MulticlassConfusionMatrix(3)}
    options = {"metrics": given, "checkpoint": tmp_path, "resume": True, "devices": 1}
    [before] = records(Net(), step_of_kinds, **options)
    after = records(Net(), step_of_kinds, epochs=2, **options)
    assert after[0] == before
    assert after[0].eval_arrays == after[1].eval_arrays != {}


# ---------------------------------------------------------------- several machines
def states(value: float) -> States:
    return [(1, {"total": torch.tensor(value), "all": [torch.tensor([value])]})]


def test_the_states_of_all_ranks_come_in_their_order_to_the_metric_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "_states", states)
    sent: list[RankMetrics] = []
    pool, follower = MetricPool(), MetricPool(sent.append)
    follower.put(0, 2, {"f1": 9.0})  # of an evaluation that was cut short
    for rank in (3, 2):
        follower.put(1, rank, {"f1": float(rank)})
    assert all(type(message.states) is bytes for message in sent)  # no tensor travels in the message itself
    for message in sent[:2]:
        pool.take(message)
    pool.put(1, 1, {"f1": 1.0})
    pool.put(1, 0, {"f1": 0.0})
    pool.take(sent[2])
    metric, ranks = pool.merged(1)["f1"]
    assert [of[0][1]["total"].item() for of in ranks] == [0.0, 1.0, 2.0, 3.0]
    assert metric == 0.0
    assert pool.merged(1) == {}  # the pool has let go of them
    pool.take(sent[1])
    with pytest.raises(TypeError, match="not on machine 0"):
        pool.merged(1)
