"""Metrics and means of an evaluation on several machines: each case for the job, and for one device.

Run as a script, it trains all cases. The model is not changed by its training (a learning rate of 0), so that
its numbers do not depend on who trained what.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torchmetrics import classification

import flowdp
from tests.machines.launch import report

SAMPLES, JUDGED, INPUTS, CLASSES = 64, 203, 6, 3

CASES = ("criterion", "given to the step", "of the model", "no mean", "few samples", "by steps", "weights")
REFUSED = "one machine alone"


class Net(nn.Module):
    """A linear model with a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, CLASSES)
        self.f1 = classification.MulticlassF1Score(CLASSES, average="macro")
        self.largest = torchmetrics.MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs whose first column tells their classes, more or less."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=draw)
    noise = torch.randn(count, generator=draw)
    return x, (x[:, 0] * 2 + noise).clamp(0, CLASSES - 1).long()


def collection() -> dict[str, Any]:
    """Metrics with each kind of state: sums, counts of classes, lists of all samples, a weighted mean."""
    return {
        "f1": classification.MulticlassF1Score(CLASSES, average="macro"),
        "confusion": classification.MulticlassConfusionMatrix(CLASSES),
        "auroc": classification.BinaryAUROC(),
        "spread": torchmetrics.CatMetric(),
        "mean": torchmetrics.MeanMetric(),
    }


def with_given(model: nn.Module, batch: Sequence[Tensor], metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    x, y = batch
    out = model(x)
    metrics["f1"].update(out, y)
    metrics["confusion"].update(out, y)
    metrics["auroc"].update(out.softmax(1)[:, 0], (y == 0).long())
    metrics["mean"].update(out[:, 0], weight=y + 1)
    metrics["spread"].update(out[x[:, 0] > 1.4, 1])
    return {"loss": F.cross_entropy(out, y), "index": x[:, 1].mean()}


def of_the_model(model: Any, batch: Sequence[Tensor]) -> dict[str, Any]:
    x, y = batch
    out = model(x)
    model.f1.update(out, y)
    model.largest.update(out)
    return {"macro": model.f1, "largest": model.largest, "loss": F.cross_entropy(out, y)}


def no_mean(model: Any, batch: Sequence[Tensor]) -> dict[str, Any]:
    model.f1.update(model(batch[0]), batch[1])
    return {"macro": model.f1}


def on_machine_1(model: Any, batch: Sequence[Tensor]) -> dict[str, Any]:
    import torch.distributed as dist

    return no_mean(model, batch) if dist.get_rank() == 1 else {"loss": model(batch[0]).mean()}


def weighted(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Any]:
    """A mean over the samples of two classes; no batch has the third one alone."""
    x, y = batch
    count = (y != 2).sum()
    total = F.cross_entropy(model(x), y, ignore_index=2, reduction="sum")
    return {"loss": total / count.clamp(min=1), "weight": count, "double": 2 * total / count.clamp(min=1)}


def options(case: str) -> dict[str, Any]:
    steps = {"of the model": of_the_model, "no mean": no_mean, "few samples": no_mean, REFUSED: on_machine_1}
    found: dict[str, Any] = {"step": steps.get(case)}
    if case in ("given to the step", "by steps"):
        found["step"] = with_given
    if case == "by steps":
        found |= {"every": 4, "unit": "step"}
    if case == REFUSED:
        found["sanity_check"] = 0
    return found


def trainer(case: str, devices: int, **more: Any) -> flowdp.Trainer:
    torch.manual_seed(1)
    metrics: Any = None
    if case == "criterion":
        both = ("f1", "confusion")
        metrics = torchmetrics.MetricCollection({name: collection()[name] for name in both})
    elif case in ("given to the step", "by steps"):
        metrics = collection()
    judged = 5 if case == "few samples" else JUDGED
    return flowdp.Trainer(
        Net(),
        lambda params: torch.optim.SGD(params, lr=0.0),
        weighted if case == "weights" else nn.CrossEntropyLoss(),
        dataset=data(SAMPLES, 1),
        batch_size=8,
        epochs=2,
        devices=["cpu"] * devices,
        policy="exact",
        evaluation=flowdp.EvaluationOptions(data(judged, 2), **options(case)),
        metrics=metrics,
        progress=False,
        **more,
    )


def numbers(run: flowdp.Run) -> list[dict[str, Any]]:
    """Numbers and arrays of each evaluation of a run."""
    events = [(one.eval, one.eval_arrays) for one in run.metrics("evaluation")]
    epochs = [(one.eval, one.eval_arrays) for one in run.join().history]
    found = [one for one in (*epochs, *events) if one[0]]
    arrays = [{name: list(one.values) for name, one in arrays.items()} for _, arrays in found]
    for one in arrays:  # in the order in which the ranks came
        one.get("spread", []).sort()
    return [{"eval": dict(means), "arrays": one} for (means, _), one in zip(found, arrays, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        try:
            for index, one in enumerate(numbers(trainer(case, 2).start())):
                report("evaluated", case=case, index=index, **one)
        except flowdp.FlowdpError as error:
            report("refused", case=case, error=str(error)[:1000])
