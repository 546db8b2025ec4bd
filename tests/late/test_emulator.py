"""The emulator itself: its operations have the values of the CPU, and it shows each kind of missing edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.late.device import LateCuda, LateStream
from tests.late.install import installed
from tests.late.orders import EAGER, LATE, Order, shuffled

CARD, OTHER = "cuda:0", "cuda:1"
ORDERS = [LATE, EAGER, shuffled(0)]


@pytest.fixture
def cuda() -> Iterator[LateCuda]:
    with installed(LateCuda(2)) as machine:
        yield machine


def value_of(tensor: Tensor) -> float:
    """What lies in a tensor now, whether it has been computed or not."""
    return float(torch._C.TensorBase.tolist(tensor.reshape(-1)[0].detach()))


def is_late(tensor: Tensor) -> bool:
    return value_of(tensor) != value_of(tensor)


# ---------------------------------------------------------------- values


def test_nothing_runs_before_it_is_waited_for(cuda: LateCuda) -> None:
    x = torch.ones(4, device=CARD)
    y = x + 1
    assert is_late(x)
    assert is_late(y)
    assert cuda.executed == 0
    assert y.sum().item() == 8.0
    assert value_of(x) == 1.0


# ---------------------------------------------------------------- edges
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("has_edge", [False, True])
def test_a_missing_edge_gives_wrong_numbers(order: Order, has_edge: bool) -> None:
    with installed(LateCuda(1, order)) as cuda:
        one, two = cuda.Stream(CARD), cuda.Stream(CARD)
        event = cuda.Event()
        with cuda.stream(one):
            x = torch.zeros(2, device=CARD)
            for _ in range(9):
                x.add_(1)
            event.record()
        if has_edge:
            two.wait_event(event)
        with cuda.stream(two):
            y = x + 0
            found = y.tolist()
    assert not has_edge or found == [9.0, 9.0]
    if order is LATE:
        assert has_edge == (found == [9.0, 9.0])


# ---------------------------------------------------------------- several devices


def test_a_copy_between_devices_takes_part_in_the_current_streams_of_both(cuda: LateCuda) -> None:
    here, there = cuda.Stream(CARD), cuda.Stream(OTHER)
    with cuda.stream(here), cuda.stream(there):
        source = torch.ones(2, device=CARD) + 1
        target = torch.zeros(2, device=OTHER).fill_(5)
        target.copy_(source)
        source.zero_()
        copied = target + 0
    here.synchronize()
    assert value_of(target) == 2.0
    there.synchronize()
    assert value_of(copied) == 2.0


# ---------------------------------------------------------------- host and device


def test_pinned_memory_is_read_when_a_copy_runs(cuda: LateCuda) -> None:
    pinned = torch.ones(2).pin_memory()
    assert pinned.is_pinned()
    card = torch.empty(2, device=CARD).copy_(pinned, non_blocking=True)
    pinned.fill_(7)
    assert card.tolist() == [7.0, 7.0]


# ---------------------------------------------------------------- memory
def used_elsewhere(cuda: LateCuda, end: Callable[[LateStream, LateStream, Tensor], None]) -> Tensor:
    """Free memory that another stream uses, allocate again, and return the use's result."""
    owner, user = cuda.Stream(CARD), cuda.Stream(CARD)
    with cuda.stream(owner):
        x = torch.ones(2, device=CARD)
    user.wait_stream(owner)
    with cuda.stream(user):
        y = x + 1
    end(owner, user, x)
    del x
    with cuda.stream(owner):
        torch.zeros(2, device=CARD)
    owner.synchronize()
    user.synchronize()
    return y


ENDS: dict[str, Callable[[LateStream, LateStream, Tensor], None]] = {
    "nothing": lambda owner, user, x: None,
    "record_stream": lambda owner, user, x: x.record_stream(user),  # type: ignore[arg-type]
    "the owner waits": lambda owner, user, x: owner.wait_stream(user),
    "the host waits": lambda owner, user, x: user.synchronize(),
}


@pytest.mark.parametrize("end", ENDS)
def test_memory_that_is_freed_while_another_stream_uses_it(cuda: LateCuda, end: str) -> None:
    y = used_elsewhere(cuda, ENDS[end])
    hazards, is_right = len(cuda.memory.hazards), y.tolist() == [2.0, 2.0]
    assert (hazards, is_right) == ((1, False) if end == "nothing" else (0, True))


# ---------------------------------------------------------------- threads


def test_nothing_is_left_behind() -> None:
    with installed(LateCuda(1)):
        torch.ones(1, device=CARD)
    assert torch.cuda.Stream.__module__.startswith("torch")
    assert "device" not in vars(torch.Tensor)
    x = torch.ones(1)
    assert x.device == torch.device("cpu")
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
