"""Metrics of a Trainer on several devices equal those of one device, and those of a plain loop."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp import EvaluationOptions, Trainer, current_worker
from tests.vision import mend_torchvision

mend_torchvision()
torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics.classification import (  # noqa: E402
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

SAMPLES, CLASSES, BOXES = 1003, 5, 2
torch.manual_seed(7)
X, Y = torch.randn(SAMPLES, 4), torch.randint(0, CLASSES, (SAMPLES,))
CORNERS = torch.rand(SAMPLES, BOXES, 2) * 100
TRUE = torch.cat([CORNERS, CORNERS + 5 + torch.rand(SAMPLES, BOXES, 2) * 20], dim=2)
KINDS = torch.randint(0, CLASSES, (SAMPLES, BOXES))
WAIT_S = 60.0


def metrics() -> dict[str, Any]:
    return {
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "auroc": MulticlassAUROC(CLASSES),
        "confusion": MulticlassConfusionMatrix(CLASSES),
    }


def detected(logits: Tensor, batch: Any) -> tuple[Any, Any]:
    """Boxes that lie beside the true ones by as much as the model's outputs say."""
    _, _, boxes, kinds = batch
    targets = [{"boxes": b, "labels": k} for b, k in zip(boxes, kinds, strict=True)]
    shift, scores = 3.0 * logits[:, :1, None], logits.softmax(1)[:, :BOXES]
    found = [
        {"boxes": b, "scores": s, "labels": k} for b, s, k in zip(boxes + shift, scores, kinds, strict=True)
    ]
    return found, targets


def update(given: Any, logits: Tensor, batch: Any) -> None:
    for name, metric in given.items():
        if name == "map":
            metric.update(*detected(logits, batch))
        else:
            metric.update(logits, batch[1])


def together(step: Callable[..., Any], ranks: int) -> Callable[..., Any]:
    """A step whose first call on each rank waits for those of the others, so that all evaluate a batch."""
    meeting, seen = threading.Barrier(ranks), set()

    def wrapped(model: Any, batch: Any, metrics: Any) -> Any:
        if (rank := current_worker().rank) not in seen:
            seen.add(rank)
            meeting.wait(WAIT_S)
        return step(model, batch, metrics)

    return wrapped


def evaluated(model: nn.Module, devices: int, **options: Any) -> Any:
    [record] = (
        Trainer(
            model,
            lambda params: torch.optim.SGD(params, 0.0),
            dataset=(X, Y),
            per_device_batch_size=64,
            devices=["cpu"] * devices,
            policy="sync",
            **{"max_steps": 3, **options},
        )
        .fit()
        .history
    )
    return record


def step(model: nn.Module, batch: Any, metrics: Any) -> Any:
    logits = model(batch[0])
    update(metrics, logits, batch)
    return {"loss": F.cross_entropy(logits, batch[1])}


def test_metrics_of_three_devices_are_those_of_one_and_of_a_plain_loop() -> None:
    pytest.importorskip("pycocotools")
    from torchmetrics.detection import MeanAveragePrecision

    given = {**metrics(), "map": MeanAveragePrecision()}
    plain, model = copy.deepcopy(given), nn.Linear(4, CLASSES)
    with torch.no_grad():
        for batch in zip(X.split(50), Y.split(50), TRUE.split(50), KINDS.split(50), strict=True):
            update(plain, model(batch[0]), batch)
    records = [
        evaluated(
            model,
            devices,
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            metrics=given,
            evaluation=EvaluationOptions((X, Y, TRUE, KINDS), step=together(step, devices), sanity_check=0),
        )
        for devices in (1, 3)
    ]
    precision = plain["map"].compute()
    for record in records:
        assert record.eval["f1"] == pytest.approx(plain["f1"].compute().item(), abs=1e-6)
        assert record.eval["auroc"] == pytest.approx(plain["auroc"].compute().item(), abs=1e-6)
        assert record.eval_arrays["confusion"].tolist() == plain["confusion"].compute().tolist()
        for name in ("map", "map_50", "map_75", "mar_10"):
            assert 0 < precision[name] < 1
            assert record.eval[f"map/{name}"] == pytest.approx(precision[name].item(), abs=1e-6)
        assert record.eval_arrays["map/classes"].tolist() == list(range(CLASSES))
        assert "confusion" not in str(record)
    assert records[0].eval == pytest.approx(records[1].eval, abs=1e-6)
    assert not any(metric._update_count for metric in given.values())  # the user's own are not touched
