"""Tests of the replica of policy="exact" alone; tests/numerics compares it with one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowdp.collective.batch_norm import RankGroups
from flowdp.data.batches import Portion
from flowdp.device.worker_context import CurrentWorker
from flowdp.protocol.gate import Outcome, Window
from flowdp.protocol.messages import SampleRange
from flowdp.replica.exact_replica import CHECKSUMS, ExactReplica
from tests.parts import parts_of

CPU = torch.device("cpu")
X, Y = torch.arange(14.0).reshape(7, 2), torch.ones(7, 1)
ALONE = Outcome(0, 1, (0,), (1,), (7,), window=Window(touched=None))


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def replica(
    loss: Callable[..., Any] = mse, size: int = 3, **options: Any
) -> tuple[ExactReplica, CurrentWorker]:
    torch.manual_seed(0)
    module = options.pop("module", None) or nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    parts = parts_of(module, optimizer, **options)
    own = ExactReplica(parts, loss, size=size, groups=RankGroups([]))
    return own, CurrentWorker(0, CPU, module, samples=7, sink=lambda *_: None)


def part(start: int = 0, stop: int = 7) -> Portion:
    return Portion.of((X, Y), 7, SampleRange(start, stop))


@pytest.mark.parametrize(("size", "sizes"), [(3, [2, 2, 3]), (7, [7]), (100, [7]), (1, [1] * 7), (4, [3, 4])])
def test_a_part_is_cut_into_micro_batches_as_equal_as_can_be(size: int, sizes: list[int]) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(len(batch[0]))
        assert worker.samples == len(batch[0]) == len(batch[1])
        return mse(model, batch)

    mine, worker = replica(loss, size)
    mine.add(part(), worker)
    value = mine.step()
    assert seen == sizes
    assert value is not None
    torch.testing.assert_close(value, mse(mine.module, (X, Y)).detach())


@pytest.mark.parametrize(
    ("size", "pieces", "forwards"), [(2, 1, 3), (4, 1, 2), (4, 4, 3), (1, 1, 7), (7, 1, 1)]
)
def test_a_micro_batch_suffices_for_batch_norm(size: int, pieces: int, forwards: int) -> None:
    mine, _ = replica(size=size, module=nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    mine.pieces = pieces
    assert mine.forwards(part(), 7) == forwards


def test_the_optimizer_steps_at_the_meeting_and_not_before() -> None:
    mine, worker = replica()
    before = mine.module.weight.detach().clone()
    mine.add(part(), worker)
    mine.step()
    assert torch.equal(mine.module.weight, before)
    mine.averaged.gather()
    gradient = mine.module.weight.grad.clone()
    mine.meet(ALONE)
    torch.testing.assert_close(mine.module.weight.detach(), before - 0.01 * gradient)
    assert not mine.module.weight.grad.any()


def test_a_micro_batch_of_no_weight_has_no_part_in_it() -> None:
    """Its mean, over nothing, is NaN."""

    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        counted = batch[0][:, 0] >= 6
        values = (model(batch[0]) - batch[1]).square().flatten()[counted]
        return {"loss": values.mean(), "weight": counted.sum(), "extra": 1.0}

    mine, worker = replica(loss, 1)
    mine.add(part(), worker)
    value = mine.step()
    assert value is not None
    assert mine.loss.step_weight is not None
    assert mine.loss.step_weight.item() == pytest.approx(4 / 7)  # of 7 samples
    torch.testing.assert_close(value.float(), mse(mine.module, (X[3:], Y[3:])).detach())
    before = mine.module.weight.detach().clone()
    expected = torch.autograd.grad(mse(mine.module, (X[3:], Y[3:])), mine.module.weight)[0]
    mine.averaged.gather()
    mine.meet(ALONE)
    torch.testing.assert_close(mine.module.weight.detach(), before - 0.01 * expected)


def test_a_part_without_any_weight_counts_for_nothing() -> None:
    mine, worker = replica(lambda model, batch: {"loss": mse(model, batch) * float("nan"), "weight": 0})
    mine.add(part(), worker)
    value = mine.step()
    assert value is not None
    assert mine.loss.step_weight is not None
    assert (value.item(), mine.loss.step_weight.item()) == (0.0, 0.0)


def test_fp16_unscales_gradients_and_neither_weight_nor_buffer() -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": model(batch[0]).float().mean() * 1e-2, "weight": 2.0 * len(batch[0])}

    mine, worker = replica(loss, precision="fp16")
    before = mine.module.bias.detach().clone()
    mine.add(part(), worker)
    mine.step()
    mine.averaged.gather()
    assert mine.gradients.weight.item() == pytest.approx(2.0)
    mine.meet(ALONE)
    torch.testing.assert_close(mine.module.bias.detach(), before - 0.01 * 1e-2)


def test_checksums_are_told_later_and_not_mixed_up() -> None:
    mine, _ = replica()
    told, expected = [], []
    for number in range(CHECKSUMS):
        mine.module.weight.data.fill_(number)
        told.append(mine.checksum())
        expected.append(int(mine.flat.checksum()))
    assert [tell().sum for tell in told] == expected
    assert len(set(expected)) == CHECKSUMS


@pytest.mark.parametrize("named", [False, True])
def test_a_part_that_begins_again_leaves_nothing_behind(named: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": mse(model, batch), "weight": len(batch[0])} if named else mse(model, batch)

    (mine, worker), (twin, other) = replica(loss), replica(loss)
    for _ in range(2):
        mine.begin()
        mine.add(part(0, 5), worker)
        mine.undo()
        assert not any(parameter.grad.any() for parameter in mine.module.parameters())
        mine.pieces *= 2
        mine.add(part(), worker)
        twin.add(part(), other)
        found, wanted = mine.step(), twin.step()
        assert found is not None
        assert wanted is not None
        torch.testing.assert_close(found.double(), wanted.double())
        torch.testing.assert_close(mine.gradients.weight, twin.gradients.weight)
        for one in (mine, twin):
            one.averaged.gather()
            one.meet(ALONE)
    torch.testing.assert_close(mine.module.weight, twin.module.weight)
