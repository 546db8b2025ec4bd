"""Tests of torch's modes: another thread computes in those of its caller."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from flowdp.device.torch_modes import caller_modes, unhooked, watcher

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


# ---------------------------------------------------------------- what watches the thread
class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def module_hook() -> Iterator[None]:
    handle = register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


WATCHERS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "a counter": (lambda: FlopCounterMode(display=False), "FlopCounter"),
    "a function mode": (Function, "Function"),
    "saved tensors": (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        "a hook on saved tensors",
    ),
    "offloading": (torch.autograd.graph.save_on_cpu, "a hook on saved tensors"),
    "a dual level": (forward_ad.dual_level, "forward-mode differentiation"),
    "a hook on all modules": (module_hook, "a hook on all modules"),
}


OF_ALL_THREADS = ("a counter", "a hook on all modules", "a dual level")
"""Those that others have, too: a counter hooks all modules, and torch counts levels for the process."""


@pytest.mark.parametrize("kind", WATCHERS)
def test_what_sees_the_calling_thread_alone_is_named_while_it_does(kind: str) -> None:
    make, name = WATCHERS[kind]
    assert watcher() is None
    with make():
        assert name in str(watcher())
        thread = threading.Thread(target=lambda: seen.append(watcher()))
        seen: list[str | None] = []
        thread.start()
        thread.join()
        assert (seen == [None]) is (kind not in OF_ALL_THREADS)
    assert watcher() is None


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("cpu"),
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    ],
    ids=["no grad", "inference", "autocast", "device", "anomaly"],
)
def test_modes_that_all_threads_enter_are_no_watchers(context: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with context():
            assert watcher() is None


def test_the_callers_device_is_entered_where_it_is_set() -> None:
    found: list[torch.device] = []
    with torch.device("meta"):
        modes = caller_modes(CPU)

    def body() -> None:
        with modes():
            found.append(torch.ones(1).device)
        found.append(torch.ones(1).device)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert [device.type for device in found] == ["meta", "cpu"]
