"""Tests of the mean of buffers over ranks: weighted by samples, the maximum for integers."""

from __future__ import annotations

import torch
from torch import nn

from flowdp.data_parallel.buffer_mean import average_buffers
from tests.loops import replicas_of


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("short", torch.zeros(1, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(False))


def fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.fill_(value)
        next(module.parameters()).fill_(value)


def test_floats_are_averaged_by_samples_and_counts_take_the_maximum() -> None:
    module = Buffered()
    with replicas_of(module, 3) as replicas:
        for rank, value in enumerate((0.0, 4.0, 100.0)):
            fill(replicas.modules[rank], value)
        before = [buffer.clone() for buffer in replicas.modules[1].buffers()]
        average_buffers(replicas, (1, 3, 0))
        assert module.mean.tolist() == [3.0, 3.0]
        assert module.short.item() == 3.0
        assert module.short.dtype == torch.float16
        assert module.count.item() == 4, "a rank without samples gives nothing"
        assert module.seen.item() is True
        assert module.weight.tolist() == [0.0, 0.0]
        assert all(map(torch.equal, before, replicas.modules[1].buffers()))


def test_complex_numbers_are_averaged_too() -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with replicas_of(module) as replicas:
        replicas.buffers(1)[0].fill_(4.0j)
        average_buffers(replicas, (1, 3))
        assert module.wave.tolist() == [3j, 3j]


def test_nobody_else_has_samples() -> None:
    module = Buffered()
    with replicas_of(module) as replicas:
        fill(replicas.modules[1], 9.0)
        for samples in ((0, 0), (5, 0)):
            average_buffers(replicas, samples)
            assert not any(buffer.any() for buffer in module.buffers())
        average_buffers(replicas, (0, 5))
        assert all((buffer == 9.0).all() or buffer.dtype == torch.bool for buffer in module.buffers())


def test_the_mean_is_taken_in_double_precision() -> None:
    module = nn.BatchNorm1d(1)
    values = torch.tensor([0.22, 1.69, 2.94])  # in single precision the last bit would be lost
    with replicas_of(module, 3) as replicas:
        for replica, value in zip(replicas.modules, values, strict=True):
            replica.running_mean.fill_(value)  # type: ignore[union-attr, operator]
        average_buffers(replicas, (1, 1, 1))
        assert module.running_mean.item() == values.double().mean().float().item()  # type: ignore[union-attr]
