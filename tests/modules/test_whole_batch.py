"""Tests of modules whose training forward needs the whole batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import flowdp
from flowdp import OptionError
from flowdp.device.streams import HostLane
from flowdp.modules.whole_batch import Written, check_embeddings

X = torch.arange(48).reshape(24, 2) % 8
CPUS = ["cpu", "cpu"]


def bag(**options: Any) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(8, 3, **options), nn.Linear(3, 1))


def train(model: nn.Module, make: Any = torch.optim.SGD, devices: int = 2, **options: Any) -> flowdp.Run:
    given: dict[str, Any] = {
        "model": model, "optimizer": lambda params: make(params, lr=0.1), "dataset": (X,),
        "loss": lambda model, batch: model(batch[0]).square().mean(), "per_device_batch_size": 4,
        "batch_size": 8, "epochs": 1, "policy": "exact", "devices": ["cpu"] * devices,
        "progress": False,
    }  # fmt: skip
    run = flowdp.Trainer(**given | options).start()
    run.join()
    return run


@pytest.mark.parametrize("devices", [1, 2])
def test_frequencies_in_a_part_of_the_batch_are_refused(devices: int) -> None:
    with pytest.raises(OptionError, match=r"'0' has scale_grad_by_freq=True.*a part of the batch alone"):
        train(bag(scale_grad_by_freq=True), devices=devices)


def test_rows_that_one_device_alone_would_shorten_are_refused() -> None:
    with pytest.raises(OptionError, match=r"policy='exact': EmbeddingBag '0' has max_norm=0.5: its forward"):
        train(bag(max_norm=0.5))
    assert train(bag(max_norm=0.5), devices=1).state.global_step == 3
    frozen = bag(max_norm=0.5, scale_grad_by_freq=False)
    frozen[0].requires_grad_(False)
    assert train(frozen).state.global_step == 3


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_setup_refuses_them_where_batches_are_cut(options: dict[str, Any]) -> None:
    model = nn.Embedding(8, 3, **options)
    with pytest.raises(OptionError, match="setup: the Embedding has"):
        flowdp.setup(model, torch.optim.SGD(model.parameters(), 0.1), devices=CPUS, progress=False)
    with flowdp.setup(model, torch.optim.SGD(model.parameters(), 0.1), devices=["cpu"], progress=False) as dp:
        assert dp(X).shape == (24, 2, 3)


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_ddp_refuses_them_where_there_are_several_replicas(options: dict[str, Any]) -> None:
    models = [nn.Embedding(8, 3, **options) for _ in range(2)]
    with pytest.raises(OptionError, match=r"Ddp\.wrap: the Embedding has"):
        flowdp.Ddp.wrap(models)
    with flowdp.Ddp.wrap(models[:1]) as ddp:
        assert ddp.world_size == 1


def test_embeddings_without_either_pass() -> None:
    check_embeddings(bag(), "setup", is_shared=True)


def test_an_optimizer_for_sparse_gradients_fails_by_torchs_error() -> None:
    model = nn.Sequential(nn.Embedding(8, 3, sparse=True))
    with pytest.raises(flowdp.StepError, match="SparseAdam does not support dense gradients"):
        train(model, torch.optim.SparseAdam)
    assert train(model, torch.optim.SparseAdam, policy="sync", batch_size=None).state.global_step == 6
    assert train(model, torch.optim.Adam).state.global_step == 3


class Counts(nn.Module):
    """Writes to its buffer, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("still", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.linear(x.float())
        return out


def test_buffers_that_forward_writes_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flowdp"):
        train(Counts())
    [told] = [record.getMessage() for record in caplog.records]
    assert "forward writes to buffer 'seen' of Counts: that changes once per micro-batch" in told
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flowdp"):
        train(Counts(), devices=1, per_device_batch_size=8)  # a window is one forward
        train(Counts(), policy="sync", batch_size=None)
        train(nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 1)), dataset=(X.float(),))
    assert not caplog.records


def test_spectral_norm_is_told_and_batch_norm_is_not(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(spectral_norm(nn.Linear(2, 3)), nn.BatchNorm1d(3))
    written = Written(model, HostLane(torch.device("cpu")))
    with caplog.at_level(logging.WARNING, "flowdp"):
        written.begin()
        written.tell(is_shared=True)
        assert not caplog.records
        for _ in range(2):
            model(X.float())
            written.tell(is_shared=True)
    assert caplog.text.count("'0.parametrizations.weight.0._u' of _SpectralNorm") == 1
    assert "num_batches_tracked" not in caplog.text


class Follows(nn.Module):
    """Has a frozen copy of its weight that its forward moves towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.teacher = nn.Linear(2, 1).requires_grad_(False)
        self.teacher.load_state_dict(self.linear.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        # Not counted by torch; and in the first window it changes nothing.
        self.teacher.weight.data.lerp_(self.linear.weight.data, 0.5)
        out: Tensor = self.linear(x.float())
        return out


def test_a_forward_that_writes_to_frozen_parameters(caplog: pytest.LogCaptureFixture) -> None:
    told = r"at its step 1 .*'teacher.weight' was written to by .*Write to it in Callback.on_step"
    with pytest.raises(flowdp.StepError, match=told):
        train(Follows())
    with caplog.at_level(logging.WARNING, "flowdp"):
        train(Follows(), devices=1, per_device_batch_size=8)
        assert not caplog.records
        train(Follows(), devices=1, per_device_batch_size=4)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "writes to the frozen parameter 'teacher.weight': that changes once per micro-batch" in warning
