"""Tests of a user's loop on several replicas of a card: the results of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flowdp
from tests.gpu.conftest import Ranks

STEPS = 30


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).double()


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [8 if number % 5 else 5 for number in range(count)]
    return [
        (
            torch.randn(size, 6, dtype=torch.float64, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for size in sizes
    ]


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_call_is_that_of_one_device(ranks: Ranks, world_size: int) -> None:
    devices = ranks(world_size)
    model = small_model().to(devices[0])
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), 1e-2, fused=True) for m in (model, twin))
    unequal = flowdp.CadenceOptions(max_anchor=0, speed_hint=(0, 3.0))
    with flowdp.setup(model, ours, devices=devices, cadence=unequal) as dp:
        for x, y in batches():
            x, y = x.to(devices[0]), y.to(devices[0])
            for module, optimizer in ((dp, ours), (twin, theirs)):
                F.cross_entropy(module(x), y).backward()
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert_same(model, twin)
        with torch.no_grad():
            x = batches(1)[0][0].to(devices[0])
            torch.testing.assert_close(dp(x), twin(x))


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_window_is_one_big_batch(ranks: Ranks, has_loss: bool) -> None:
    devices = ranks(2)
    model = small_model().to(devices[0])
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    options = flowdp.CadenceOptions(anchor=2, speed_hint=(1, 2.0))
    loss = (lambda context: F.cross_entropy(context.output, context.batch[1])) if has_loss else None
    with flowdp.setup(model, ours, devices=devices, cadence=options, loss_fn=loss) as dp:
        samples = 0
        for window in dp.epoch(batches()):
            result = dp.forward_batch(window)
            if not has_loss:
                F.cross_entropy(result.output, window[1]).backward()
            F.cross_entropy(twin(window[0]), window[1]).backward()
            dp.step()
            theirs.step()
            theirs.zero_grad()
            samples += window.samples
        assert samples == sum(len(x) for x, _ in batches())
        assert_same(model, twin)


class Slow(torch.autograd.Function):
    """Keeps the device busy, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        spin(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        spin(gradient)
        return gradient


def spin(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda._sleep(2_000_000)


class Late(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Slow.apply(x)
        return out


def test_devices_that_run_late_change_nothing(ranks: Ranks) -> None:
    """A missing edge between streams shows when one of them is late."""
    devices = ranks(2)
    model = nn.Sequential(Late(), small_model(), Late()).to(devices[0])
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    with flowdp.setup(model, ours, devices=devices, cadence=False) as dp:
        for x, y in batches():
            x, y = x.to(devices[0]), y.to(devices[0])
            for module, optimizer in ((dp, ours), (twin, theirs)):
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_same(model, twin)


def test_replicas_averaged_by_hand_are_those_of_one_device(ranks: Ranks) -> None:
    """With NCCL if each replica has its own card and NCCL is installed."""
    devices = ranks(2)
    twin = small_model().to(devices[0])
    models = [small_model().to(device) for device in devices]
    with torch.no_grad():
        models[1][0].weight.zero_()  # type: ignore[index]

    def backward(_rank: int, model: nn.Module, part: tuple[torch.Tensor, torch.Tensor]) -> int:
        x, y = (tensor.to(next(model.parameters()).device) for tensor in part)
        F.cross_entropy(model(x), y).backward()
        return len(x)

    with flowdp.Ddp.wrap(models, devices) as ddp:
        ddp.sync_params()
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (*models, twin)]
        for x, y in batches():
            counts = ddp.parallel(backward, [(x[:2], y[:2]), (x[2:], y[2:])])
            ddp.weighted_all_reduce_gradients(counts)
            backward(0, twin, (x, y))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for model in models:
            for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(
                    mine.cpu(), theirs.cpu(), rtol=0, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}"
                )


class Lengths(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of many lengths, filled with their index."""

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((index % 7 + 1,), float(index)), torch.tensor(index)


def padded(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    rows, indices = zip(*samples, strict=True)
    return [nn.utils.rnn.pad_sequence(list(rows), batch_first=True), torch.stack(indices)]


def loader(kind: str) -> DataLoader[tuple[torch.Tensor, ...]]:
    if kind == "lengths":
        return DataLoader(Lengths(), batch_size=8, shuffle=True, collate_fn=padded, num_workers=1)
    index = torch.arange(90)
    return DataLoader(TensorDataset(index[:, None].expand(-1, 5).float(), index), batch_size=8, shuffle=True)


@pytest.mark.parametrize("cadence", [False, True])
@pytest.mark.parametrize("kind", ["tensors", "lengths"])
def test_windows_of_a_loader_hold_each_sample_once(ranks: Ranks, kind: str, cadence: bool) -> None:
    """Whole batches, of many lengths, go through pinned memory."""
    devices, given = ranks(2), loader(kind)
    with flowdp.setup(nn.Linear(5, 1), devices=devices, cadence=cadence) as dp:
        for _ in range(3):
            seen: list[torch.Tensor] = []
            for window in dp.epoch(given):
                for piece in window.pieces:
                    piece.arrive()
                    rows, index = piece.batch
                    if rows.is_cuda:
                        torch.cuda._sleep(1_000_000)
                    seen.append(torch.stack([rows[:, 0], index.to(rows.dtype)], 1))
            found = torch.cat([part.cpu() for part in seen])
            assert torch.equal(found[:, 0], found[:, 1])
            assert sorted(found[:, 0].tolist()) == list(range(90))
