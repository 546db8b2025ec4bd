"""Tests of torch's modes: another thread computes in those of its caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from flowdp.device.torch_modes import caller_modes, unhooked

CPU = frozenset({"cpu"})
State = tuple[bool, bool, bool, torch.dtype, bool]


def state() -> State:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def elsewhere(modes: Callable[[], AbstractContextManager[None]]) -> tuple[State, State]:
    """The state of another thread inside the modes and after them."""
    found: list[Any] = []

    def body() -> None:
        with modes():
            found.append(state())
        found.append(state())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return found[0], found[1]


@pytest.mark.parametrize(
    "context",
    [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
        lambda: torch.autocast("cpu", enabled=False),
    ],
    ids=["grad", "no grad", "inference", "float16", "no cache", "autocast off"],
)
def test_a_thread_has_the_callers_modes_while_it_works(context: Any) -> None:
    fresh = state()
    with context():
        wanted = state()
        modes = caller_modes(CPU)
    # The modes read stay valid, whatever the caller enters later, and for any number of uses.
    for _ in range(2):
        inside, after = elsewhere(modes)
        assert inside[:3] == wanted[:3]
        if wanted[2]:
            assert inside[3] == wanted[3]
            assert not inside[4]  # the cache of casts is per process
        assert after == fresh


def test_modes_that_are_off_are_switched_off() -> None:
    modes = caller_modes(CPU)
    with torch.inference_mode(), modes():
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_a_thread_that_walks_its_graphs_itself_goes_on_doing_so() -> None:
    modes = caller_modes(CPU)
    with torch.autograd.set_multithreading_enabled(False), modes():
        assert not torch._C._is_multithreading_enabled()


def test_autocast_of_other_kinds_of_device_is_left_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        modes = caller_modes(frozenset({"cuda"}))
    inside, _ = elsewhere(modes)
    assert not inside[2]


def test_hooks_on_saved_tensors_are_held_back_and_come_back_in_order() -> None:
    heard: list[str] = []

    def pack(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: [heard.append(name), tensor][1]  # type: ignore[return-value]

    x = torch.ones(2, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(pack("outer"), pack("")):
        with hooks(pack("inner"), pack("")):
            with unhooked():
                x.exp()
            assert heard == []
            x.exp()
            assert heard == ["inner"]
        x.exp()
        assert heard == ["inner", "outer"]
