"""Tests of metrics with a state: those of all ranks together equal one that saw every batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flowdp import EarlyStopping, EvaluationOptions, OptionError, StepError, Trainer, current_worker
from flowdp.engine.metrics import MetricPool, Parts, States, is_metric, named_metrics, sent_metrics
from tests.vision import mend_torchvision

mend_torchvision()
torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import classification, regression, wrappers  # noqa: E402

torch.manual_seed(5)
X, Y = torch.randn(52, 4), torch.randint(0, 3, (52,))
WAIT_S = 60.0


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
            meeting.wait(WAIT_S)
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


def test_one_metric_under_two_names() -> None:
    model = Net(f1=classification.MulticlassF1Score(3))
    expected = classification.MulticlassF1Score(3)
    expected.update(model(X), Y)

    def step(model: Any, batch: Any) -> Any:
        model.f1.update(model(batch[0]), batch[1])
        return {"f1": model.f1, "score": model.f1}

    value = pytest.approx(expected.compute().item(), rel=1e-5)
    assert evaluated(model, together(step, 2)) == [{"f1": value, "score": value}]


def test_a_wrapper_of_as_many_metrics_as_outputs() -> None:
    def wrapper() -> Any:
        return wrappers.MultioutputWrapper(regression.MeanSquaredError(), 1)

    expected = wrapper()
    expected.update(X[:, :1], X[:, 1:2])

    def step(model: Any, batch: Any) -> Any:
        model.mse.update(batch[0][:, :1], batch[0][:, 1:2])
        return {"mse": model.mse}

    value = pytest.approx(expected.compute().item(), rel=1e-5)
    assert evaluated(Net(mse=wrapper()), together(step, 2), epochs=2) == [{"mse": value}] * 2


class WithFeatures(torchmetrics.Metric):
    """Sums a network's outputs for the samples."""

    feature_network = "network"

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.network = nn.Linear(4, 1)
        self.factor = factor
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x: Any) -> None:
        self.total = self.total + self.factor * self.network(x).sum()

    def compute(self) -> Any:
        return self.total


def test_metrics_that_share_their_features() -> None:
    model = Net(both=wrappers.FeatureShare({"one": WithFeatures(1.0), "two": WithFeatures(2.0)}))
    total = model.both["one"].network(X).sum().item()

    def step(model: Any, batch: Any) -> Any:
        model.both.update(batch[0])
        return model.both

    for means in evaluated(model, together(step, 2), epochs=2):
        assert means == pytest.approx({"one": total, "two": 2 * total}, rel=1e-4)


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
def test_one_metric_of_two_ranks_is_refused() -> None:
    metric = classification.MulticlassF1Score(3)

    def step(model: Any, batch: Any) -> Any:
        metric.update(model(batch[0]), batch[1])
        return {"f1": metric}

    with pytest.raises(
        StepError, match=r"'f1' is one MulticlassF1Score for several ranks.* make it a part of the model"
    ):
        evaluated(Net(), together(step, 2))
    assert evaluated(Net(), step, devices=1)[0].keys() == {"f1"}


def test_a_metric_of_the_training_is_not_one_of_the_evaluation() -> None:
    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        model.f1.update(logits, batch[1])
        return F.cross_entropy(logits, batch[1])

    def step(model: Any, batch: Any) -> Any:
        model.f1.update(model(batch[0]), batch[1])
        return {"f1": model.f1}

    model = Net(f1=classification.MulticlassF1Score(3))
    expected = classification.MulticlassF1Score(3)
    expected.update(model(X), Y)
    value = pytest.approx(expected.compute().item(), rel=1e-5)
    assert evaluated(model, step, loss=loss, epochs=2) == [{"f1": value}] * 2


class Words(torchmetrics.Metric):
    """A metric whose value is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("samples", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Any, labels: Any) -> None:
        self.samples = self.samples + len(labels)

    def compute(self) -> Any:
        return {"grade": "good"}


def test_a_value_that_is_no_number_is_refused() -> None:
    def step(model: Any, batch: Any) -> Any:
        model.f1.update(model(batch[0]), batch[1])
        return {"f1": model.f1}

    with pytest.raises(
        StepError, match=r"'f1/grade' must be numbers, what its compute\(\) returns, not 'good'"
    ):
        evaluated(Net(f1=Words()), step, devices=1)


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
F1 = partial(classification.MulticlassF1Score, 3)


def two(model: Any, batch: Any) -> Any:
    return {"loss": F.cross_entropy(model(batch[0]), batch[1])}


def three(model: Any, batch: Any, metrics: Any) -> Any:
    metrics["f1"].update(model(batch[0]), batch[1])
    return {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": {"f1": F1()}}, r"Give either a criterion as loss .*; or .*f\(model, batch, metrics\)"),
        ({"metrics": {"f1": F1()}, "step": two}, "nothing says what they are updated with"),
        ({"metrics": {"f1": F1()}, "step": two, "loss": nn.CrossEntropyLoss()}, "nothing says what they are"),
        ({"metrics": {"f1": F1()}, "step": three, "evaluation": None}, "give evaluation=dataset, too"),
        (
            {"metrics": F1(), "step": three},
            r"a mapping of torchmetrics objects .*, not MulticlassF1Score\(\)",
        ),
        ({"metrics": {}, "step": three}, "a mapping of torchmetrics objects"),
        ({"metrics": {"f1": F1}, "step": three}, "a mapping of torchmetrics objects"),
        ({"metrics": {3: F1()}, "step": three}, "a mapping of torchmetrics objects"),
    ],
)
def test_metrics_that_nothing_would_update_are_refused_at_once(given: Any, message: str) -> None:
    given.setdefault("loss", two)
    given.setdefault("evaluation", EvaluationOptions((X, Y), step=given.pop("step", None)))
    given.pop("step", None)
    with pytest.raises(OptionError, match=message):
        Trainer(Net(), torch.optim.SGD, dataset=(X, Y), per_device_batch_size=8, epochs=1, **given)


def test_metrics_that_were_never_updated() -> None:
    with pytest.raises(StepError, match=r"'f1' was updated for no batch: call its update\(...\)"):
        evaluated(Net(), lambda model, batch, metrics: None, devices=1, metrics={"f1": F1()})


def test_a_mean_and_a_metric_of_one_name_are_refused() -> None:
    def step(model: Any, batch: Any, metrics: Any) -> Any:
        metrics["f1"].update(model(batch[0]), batch[1])
        return {"f1": 1.0}

    with pytest.raises(StepError, match="'f1' is the name of a mean and of a metric: rename"):
        evaluated(Net(), step, devices=1, metrics={"f1": F1()})


def test_an_array_cannot_be_monitored() -> None:
    given = {"confusion": classification.MulticlassConfusionMatrix(3)}
    with pytest.raises(OptionError, match=r"'confusion' in epoch 0 has shape \(3, 3\), and one number is"):
        evaluated(Net(), step_of_kinds, metrics=given, callbacks=[EarlyStopping("confusion")], devices=1)


def test_arrays_are_in_checkpoints(tmp_path: Any) -> None:
    given = {"confusion": classification.MulticlassConfusionMatrix(3)}
    options = {"metrics": given, "checkpoint": tmp_path, "resume": True, "devices": 1}
    [before] = records(Net(), step_of_kinds, **options)
    after = records(Net(), step_of_kinds, epochs=2, **options)
    assert after[0] == before
    assert after[0].eval_arrays == after[1].eval_arrays != {}


def test_what_is_a_metric() -> None:
    f1 = classification.MulticlassF1Score(3)
    assert is_metric(f1)
    assert not is_metric(nn.Linear(1, 1))
    assert not is_metric(torch.ones(()))
    assert named_metrics({"a": 1.0}) == {"a": 1.0}


# ---------------------------------------------------------------- several machines
def states(count: int, value: float) -> States:
    return [(count, {"total": torch.tensor(value), "all": [torch.tensor([value])]})]


def parts(metric: object, *values: float, name: str = "f1") -> Parts:
    return {name: (metric, [states(1, value) for value in values])}


def totals(found: Parts) -> dict[str, list[float]]:
    return {name: [of[0][1]["total"].item() for of in ranks] for name, (_, ranks) in found.items()}


def test_the_states_of_all_machines_come_in_their_order_to_the_metrics_of_the_first() -> None:
    pool, metric = MetricPool(), object()
    pool.take(1, sent_metrics(0, parts(object(), 9.0)))  # of an evaluation that was cut short
    pool.take(2, sent_metrics(1, parts(object(), 5.0)))
    pool.keep(1, parts(metric, 1.0, 2.0))
    pool.take(1, sent_metrics(1, parts(object(), 3.0, 4.0)))
    found = pool.merged(1)
    assert totals(found) == {"f1": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert found["f1"][0] is metric
    with pytest.raises(TypeError, match="not on machine 0"):
        pool.merged(1)  # the pool has let go of them


def test_a_metric_that_machine_0_lacks_is_an_error() -> None:
    pool = MetricPool()
    pool.keep(0, parts(object(), 1.0))
    pool.take(1, sent_metrics(0, parts(object(), 1.0, name="auroc")))
    with pytest.raises(TypeError, match=r"\(auroc\) were updated on another machine and not on machine 0"):
        pool.merged(0)


def test_no_tensor_travels_in_the_message_itself() -> None:
    assert type(sent_metrics(0, parts(object(), 1.0)).states) is bytes
