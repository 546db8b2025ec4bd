"""Tests of runs with optimizers on flat memory: the bits of steps parameter by parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp.replica.replica import Replica

# A step does not depend on how a batch reached its rank.
pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

SAMPLES, BATCH_SIZE, EPOCHS = 128, 4, 2
WIDTH = 16
"""Fused kernels round the last elements of a tensor, which do not fill a vector, differently."""

LATE = 40
"""Position of the first sample that uses the layer `late`."""


class Parts(nn.Module):
    """Layers for several groups: used by all samples, by some, by none, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())
        self.head, self.late, self.unused = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, place: Tensor, x: Tensor) -> Tensor:
        hidden = self.body(x)
        y: Tensor = self.head(hidden) + self.frozen(hidden)
        return y + self.late(hidden) if int(place.min()) >= SAMPLES - LATE else y


def loss(model: nn.Module, batch: Any) -> Tensor:
    place, x, y = batch
    return F.cross_entropy(model(place, x), y)


def groups(model: Parts) -> list[dict[str, Any]]:
    norms = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
    matrices = [model.body[0].weight, model.late.weight]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0, "lr": 0.02},
        {"params": [model.head.weight, model.unused.weight, model.frozen.weight, model.frozen.bias]},
    ]


def trained(is_flat: bool, kind: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> flowdp.Result:
    monkeypatch.setattr(Replica, "may_be_flat", is_flat)
    torch.manual_seed(0)
    model = Parts()
    made: torch.optim.Optimizer
    if kind == "adamw":
        made = torch.optim.AdamW(groups(model), 0.01, fused=True)
    else:
        made = torch.optim.SGD(groups(model), 0.05, momentum=0.9, nesterov=True, foreach=False)
    data = torch.arange(SAMPLES), torch.randn(SAMPLES, WIDTH), torch.randint(WIDTH, (SAMPLES,))
    trainer = flowdp.Trainer(
        model,
        made,
        loss,
        dataset=data,
        per_device_batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        reading=flowdp.ReadingOptions(shuffle=False),
        progress=False,
        **options,
    )
    return trainer.fit()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 1, "policy": "sync"},
        {"devices": 1, "policy": "async", "gradient_accumulation_steps": 2},
        {"devices": 2, "policy": "sync"},
        {
            "devices": 3,
            "policy": "exact",
            "runtime": flowdp.RuntimeOptions(partition_ratios=[2, 1, 1]),
            "max_grad_norm": 0.5,
        },
    ],
    ids=lambda options: f"{options['policy']}-{options['devices']}",
)
def test_groups_and_parameters_of_few_samples(
    kind: str, options: dict[str, Any], lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Spans of flat memory are summed, and measured for the norm, in another order.
    tolerance = 1e-5 if options["policy"] == "exact" and lanes == "streams" else 0.0
    flat = trained(True, kind, monkeypatch, **options)
    each = trained(False, kind, monkeypatch, **options)
    torch.manual_seed(0)
    begin = Parts().state_dict()
    for name, value in each.state_dict.items():
        assert torch.allclose(flat.state_dict[name], value, rtol=0.0, atol=tolerance), name
        is_trained = not name.startswith(("unused", "frozen"))
        assert torch.equal(value, begin[name]) is not is_trained, name
