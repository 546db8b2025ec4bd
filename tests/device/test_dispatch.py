from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flowdp.device import dispatch
from flowdp.device.dispatch import RankMode, prepare_torch
from flowdp.threads.crew import Crew
from tests.limits import HANG_S
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
found = []
"""
NOTE = "found.append(make_operators.cache_info().misses); make_operators.cache_clear()\n"
DOORS = {
    "setup": """
module = model()
flowdp.setup(module, torch.optim.SGD(module.parameters()), devices=["cpu"] * {devices})(x)
""",
    "ddp": "flowdp.Ddp.wrap([model() for _ in range({devices})])\n",
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
    """The words of the last line of a new process, as torch makes the objects once per process."""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()[-1].split()


def test_each_door_with_two_devices_makes_them_and_one_device_does_not_pay_for_it() -> None:
    """Two threads that first use an operator at once under Python dispatch can crash the process."""
    doors = [door.format(devices=devices) + NOTE for devices in (1, 2) for door in DOORS.values()]
    assert output(PROGRAM + "\n".join(doors) + "print(*found)") == ["0"] * 3 + ["1"] * 3


def test_afterwards_two_threads_get_the_same_objects() -> None:
    """Without the call, some 1,000 of 3,000 differ."""
    operators, same = output(RACE)
    assert operators == same
    assert int(same) > 2000


@pytest.mark.posix
def test_threads_of_a_forked_process_differentiate() -> None:
    """Without the call, about 1 of 150 dies of a segmentation fault: two threads destroy the parent's
    engine.
    """
    assert output(FORKS) == ["0"]


class Silent(RankMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Theirs(TorchDispatchMode):
    """A mode of the user, which torch records."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def flags() -> set[bool]:
    """Torch's flags of modes, for the whole process."""
    return {value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}


@pytest.mark.parametrize("own", [FakeTensorMode, Theirs])
def test_a_mode_of_one_thread_finds_no_flag_of_a_ranks_mode_in_another(own: type[TorchDispatchMode]) -> None:
    """As when dynamo's mode compiles while another rank draws from its own generator."""
    assert flags() == {False}
    crew = Crew(["one", "two"])
    with closing(crew):
        theirs, ours = own(), Silent()
        crew.run([None, ours.__enter__])
        assert flags() == {False}
        crew.run([theirs.__enter__, None])
        crew.run([None, partial(ours.__exit__, None, None, None)])
        crew.run([partial(theirs.__exit__, None, None, None), None])
    assert flags() == {False}


def test_one_mode_in_another() -> None:
    outer, inner = Seen(), Seen()
    with outer:
        with inner:
            torch.ones(2)
        torch.ones(2)
    torch.ones(2)
    assert (outer.calls, inner.calls) == (2, 1)
    assert flags() == {False}


class Seen(RankMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_theirs_outside", [True, False])
def test_a_mode_of_the_users_own_beside_it(is_theirs_outside: bool) -> None:
    modes = FlopCounterMode(display=False), Silent()
    outer, inner = modes if is_theirs_outside else reversed(modes)
    with outer:
        with inner:
            torch.ones(2, 2) @ torch.ones(2, 2)
            assert flags() == {True}
        assert flags() == {is_theirs_outside}
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

    assert both(prepare_torch) == [None, None]
    assert most == [1, 1]
