"""Metrics of a Trainer on several devices equal those of one device, and those of a plain loop."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flowdp import EvaluationOptions, Trainer, current_worker
from tests.limits import HANG_S

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix  # noqa: E402

SAMPLES, CLASSES = 1003, 5
torch.manual_seed(7)
X, Y = torch.randn(SAMPLES, 4), torch.randint(0, CLASSES, (SAMPLES,))


class Sums(torchmetrics.Metric):  # type: ignore[misc]
    """Gives several numbers by name, as those of detection do."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(CLASSES), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        self.total += logits.softmax(1).sum(0)

    def compute(self) -> dict[str, torch.Tensor]:
        return {"first": self.total[0], "all": self.total}


@pytest.mark.parametrize("devices", [1, 3])
def test_metrics_are_those_of_a_plain_loop(devices: int) -> None:
    given = {
        "auroc": MulticlassAUROC(CLASSES),
        "confusion": MulticlassConfusionMatrix(CLASSES),
        "sums": Sums(),
    }
    plain, model = copy.deepcopy(given), nn.Linear(4, CLASSES)
    with torch.no_grad():
        for metric in plain.values():
            metric.update(model(X), Y)
    meeting, seen = threading.Barrier(devices), set[int]()

    def step(model: nn.Module, batch: Any, metrics: Any) -> Any:
        if (rank := current_worker().rank) not in seen:  # so that all evaluate a batch
            seen.add(rank)
            meeting.wait(HANG_S)
        logits = model(batch[0])
        for metric in metrics.values():
            metric.update(logits, batch[1])
        return {"loss": F.cross_entropy(logits, batch[1])}

    [record] = (
        Trainer(
            model,
            lambda params: torch.optim.SGD(params, 0.0),
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            dataset=(X, Y),
            per_device_batch_size=64,
            devices=["cpu"] * devices,
            policy="sync",
            max_steps=3,
            metrics=given,
            evaluation=EvaluationOptions((X, Y), step=step, sanity_check=0),
        )
        .fit()
        .history
    )
    assert record.eval["auroc"] == pytest.approx(plain["auroc"].compute().item(), abs=1e-6)
    assert record.eval_arrays["confusion"].tolist() == plain["confusion"].compute().tolist()
    sums = plain["sums"].compute()
    assert record.eval["sums/first"] == pytest.approx(sums["first"].item(), rel=1e-5)
    assert record.eval_arrays["sums/all"].tolist() == pytest.approx(sums["all"].tolist(), rel=1e-5)
    assert not any(metric._update_count for metric in given.values())  # the user's own are not touched
