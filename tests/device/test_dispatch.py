from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import flowdp
from flowdp.device import dispatch
from flowdp.device.dispatch import RankMode
from flowdp.threads.crew import Crew
from tests.watched import Watched, both

PROGRAM = """
import torch
from torch import nn

import flowdp
from flowdp.device.dispatch import make_operators

def model():
    return nn.Linear(2, 1)

def error(model, batch):
    return (model(batch[0]) - batch[1]).pow(2).mean()

x, y = torch.ones(8, 2), torch.ones(8, 1)
{door}
print(make_operators.cache_info().misses)
"""
DOORS = {
    "setup": """
module = model()
flowdp.setup(module, torch.optim.SGD(module.parameters()), devices=["cpu"] * {devices})(x)
""",
    "ddp": "flowdp.Ddp.wrap([model() for _ in range({devices})])",
    "trainer": """
flowdp.Trainer(
    model=model(),
    optimizer=torch.optim.SGD,
    loss=error,
    dataset=(x, y),
    batch_size=2,
    epochs=1,
    devices=["cpu"] * {devices},
    progress=False,
).fit()
""",
}
RACE = """
import sys, threading, torch
from flowdp.device.dispatch import make_operators

make_operators()
sys.setswitchinterval(1e-6)
names = torch._C._dispatch_get_all_op_names()
names = [name.partition("::")[2] for name in names if name.startswith("aten::")]
seen, start = [[], []], threading.Barrier(2)

def ask(mine):
    start.wait()
    for name in names:
        packet, _, overload = name.partition(".")
        mine.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))

threads = [threading.Thread(target=ask, args=(mine,)) for mine in seen]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(names), sum(first is second for first, second in zip(*seen, strict=True)))
"""


FORKS = """
import os, sys, threading, torch
from flowdp.device.dispatch import prepare_torch

torch.set_num_threads(1)
ones, weight = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
torch.nn.functional.linear(ones, weight).sum().backward()  # now a child makes an engine of its own
prepare_torch()

def differentiate():
    start.wait()
    torch.nn.functional.linear(ones, weight).sum().backward()

died = 0
for _ in range(150):
    child = os.fork()
    if child == 0:
        sys.setswitchinterval(1e-6)
        prepare_torch()
        start = threading.Barrier(4)
        threads = [threading.Thread(target=differentiate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    died += os.waitpid(child, 0)[1] != 0
print(died)
"""


def output(program: str) -> list[str]:
    """The words of the last line of a new process: torch makes the objects once in a process."""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("door", DOORS)
def test_a_door_with_two_devices_makes_them(door: str) -> None:
    """Two threads that first use an operator at once under Python dispatch can end the process."""
    assert output(PROGRAM.format(door=DOORS[door].format(devices=2))) == ["1"]


def test_one_device_does_not_pay_for_it() -> None:
    assert output(PROGRAM.format(door="\n".join(DOORS.values()).format(devices=1))) == ["0"]


def test_afterwards_two_threads_get_the_same_objects() -> None:
    """Without the call some 1,000 of 3,000 are others."""
    operators, same = output(RACE)
    assert operators == same
    assert int(same) > 2000


def test_threads_of_a_forked_process_differentiate() -> None:
    """Without the call about 1 of 150 die of a segmentation fault: two throw the parent's engine away."""
    assert output(FORKS) == ["0"]


class Silent(RankMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def flags() -> set[bool]:
    """The notes that torch keeps of modes, for the whole process."""
    return {value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


def test_every_mode_is_one_for_ranks() -> None:
    """One that is not puts back flags that it found while the others were inside."""
    for module in pkgutil.walk_packages(flowdp.__path__, "flowdp."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = [TorchDispatchMode]
    for kind in kinds:
        kinds += kind.__subclasses__()
    modes = [kind for kind in kinds if kind.__module__.startswith("flowdp.")]
    assert len(modes) > 3
    assert all(issubclass(mode, RankMode) for mode in modes)


@pytest.mark.parametrize("first_out", [0, 1])
def test_torch_forgets_modes_that_threads_have_left_in_any_order(first_out: int) -> None:
    assert flags() == {False}
    crew = Crew(["one", "two"])
    with closing(crew):
        modes = [Silent(), Silent()]

        def each(rank: int, do: Callable[[Any], object]) -> None:
            crew.run([partial(do, modes[rank]) if place == rank else None for place in range(2)])

        each(0, lambda mode: mode.__enter__())
        each(1, lambda mode: mode.__enter__())
        assert flags() == {True}
        each(first_out, lambda mode: mode.__exit__(None, None, None))
        assert flags() == {True}
        each(1 - first_out, lambda mode: mode.__exit__(None, None, None))
    assert flags() == {False}


def test_one_mode_in_another() -> None:
    with Silent(), Silent():
        with Silent():
            assert flags() == {True}
        assert flags() == {True}
        assert torch.ones(2).add(1).sum() == 4
    assert flags() == {False}


@pytest.mark.parametrize("is_theirs_outside", [True, False])
def test_a_mode_of_the_users_own_beside_it(is_theirs_outside: bool) -> None:
    modes = FlopCounterMode(display=False), Silent()
    outer, inner = modes if is_theirs_outside else reversed(modes)
    with outer:
        with inner:
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert flags() == {True}
    assert modes[0].get_total_flops() == 16
    assert flags() == {False}


def test_two_runs_that_start_at_once_prepare_torch_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched, inside, most = Watched(), [], []

    def make() -> int:
        inside.append(1)
        watched.await_second()
        most.append(len(inside))
        inside.clear()
        return 0

    monkeypatch.setattr(dispatch, "_preparing", watched)
    monkeypatch.setattr(dispatch, "make_operators", make)
    assert both(dispatch.prepare_torch) == [None, None]
    assert most == [1, 1]
