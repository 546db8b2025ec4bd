"""A timm model in the loop of its train.py: soft targets, an EMA of the weights, its schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flowdp
from tests.real.ways import (
    SHARES,
    Shares,
    Weights,
    as_written,
    assert_same,
    check,
    program,
    weights,
)
from tests.vision import import_timm

timm = import_timm()


def build() -> nn.Module:
    return timm.create_model("test_resnet", num_classes=5)


def imagenet(spread: Callable[..., Any]) -> Weights:
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3

    model: Any = build()
    if spread is not as_written:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # changed
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=1e-4)
    ema = ModelEmaV3(model, decay=0.9)
    mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=5)
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=2, warmup_epochs=1)
    inner = model
    model = spread(model, optimizer)  # changed
    criterion = SoftTargetCrossEntropy()
    updates = 0
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(5, (16,))
    for epoch in range(2):
        model.train()
        for start in (0, 8):
            x, y = mixup(images[start : start + 8].clone(), labels[start : start + 8])
            loss = criterion(model(x), y.to(x.dtype))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            updates += 1
            ema.update(inner, step=updates)
            scheduler.step_update(num_updates=updates)
        model.eval()
        with torch.no_grad():
            scores = model(images)
        scheduler.step(epoch + 1)
    return {**weights(model, ema.module), "scores": scores}


@pytest.mark.parametrize("shares", SHARES, ids=len)
def test_the_script_trains_the_same_weights(shares: Shares) -> None:
    check(imagenet, shares)


@pytest.mark.parametrize("devices", [2, 3])
def test_the_program_of_the_page_trains_the_weights_of_one_device(
    devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = []
    for count in (1, devices):
        names: dict[str, Any] = {}
        setup = partial(flowdp.setup, devices=["cpu"] * count)
        with monkeypatch.context() as patch:
            patch.setattr(flowdp, "setup", setup)
            torch.manual_seed(0)
            np.random.seed(0)
            exec(program("From timm's train.py"), names)
        names["model"].close()
        saved.append(torch.load("last.pt"))
    one, several = saved
    assert_same(several["model"], one["model"])
    assert_same(several["ema"], one["ema"])


def test_a_trainer_trains_the_same_weights() -> None:
    """With GroupNorm instead of BatchNorm, a timm option."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return timm.create_model("test_resnet", num_classes=5, norm_layer="groupnorm1")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(1)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(5, (16,))
    alone, together = model(), model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for start in (0, 8):
        optimizer.zero_grad()
        loss(alone, (images[start : start + 8], labels[start : start + 8])).backward()
        optimizer.step()
    flowdp.Trainer(
        model=together,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        loss=loss,
        dataset=(images, labels),
        per_device_batch_size=2,
        batch_size=8,
        epochs=1,
        reading=flowdp.ReadingOptions(shuffle=False),
        policy="exact",
        devices=["cpu", "cpu"],
        progress=False,
    ).start().join()
    assert_same(weights(together), weights(alone))
