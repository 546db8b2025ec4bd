from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import flowdp
from flowdp.device.compiled import (
    FirstCalls,
    Uncompiled,
    uses_compile,
)
from flowdp.device.dispatch import RankMode
from flowdp.replica.model_copy import copy_module
from flowdp.threads.crew import Crew
from tests.limits import HANG_S

RANKS = 10
SAMPLES = 246
BATCH = 8
X, Y = torch.randn(SAMPLES, 4), torch.randint(2, (SAMPLES,))

Batch = tuple[Tensor, Tensor]


class Backend:
    """Compiles nothing, and counts the calls of its graphs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0

    def __call__(self, graph: Any, example: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            with self._lock:
                self.calls += 1
            return graph.forward(*inputs)

        return run

    def __deepcopy__(self, memo: object) -> Backend:
        return self


@pytest.fixture
def backend() -> Iterator[Backend]:
    torch._dynamo.reset()
    counters.clear()
    before = {name: getattr(torch._dynamo.config, name) for name in ("recompile_limit", *OTHERS)}
    yield Backend()
    for name, value in before.items():
        setattr(torch._dynamo.config, name, value)
    torch._dynamo.reset()
    counters.clear()


OTHERS = ("accumulated_recompile_limit",)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x).relu())
        return made


def error(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def in_place(backend: Backend) -> nn.Module:
    net = Net()
    net.compile(backend=backend)
    return net


def as_instance(backend: Backend) -> dict[str, Any]:
    return {"model": torch.compile(Net(), backend=backend), "loss": error}


def as_factory(backend: Backend) -> dict[str, Any]:
    return {"model": lambda: torch.compile(Net(), backend=backend), "loss": error}


def by_method(backend: Backend) -> dict[str, Any]:
    return {"model": in_place(backend), "loss": error}


def by_loss(backend: Backend) -> dict[str, Any]:
    return {"model": Net(), "loss": torch.compile(error, backend=backend)}


def by_step(backend: Backend) -> dict[str, Any]:
    forward = torch.compile(error, backend=backend)

    def step(worker: flowdp.CurrentWorker, batch: Batch) -> dict[str, Tensor]:
        loss = forward(worker.model, batch)
        worker.backward(loss)
        worker.step(worker.optimizers[0])
        return {"loss": loss}

    return {"model": Net(), "train_step": step}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def train(**options: Any) -> None:
    options = {
        "policy": "cadence",
        "per_device_batch_size": BATCH,
        "epochs": 2,
        "devices": ["cpu"] * RANKS,
        **options,
    }
    flowdp.Trainer(optimizer=sgd, dataset=(X, Y), progress=False, **options).fit()


def assert_compiled(backend: Backend, calls: int, most: int) -> None:
    """Assert that every call ran a graph, and that dynamo saw few frames, all of them compiled."""
    frames = counters["frames"]
    assert backend.calls == calls
    assert frames["total"] == frames["ok"] <= most


@pytest.mark.parametrize("make", [as_instance, as_factory, by_method, by_loss, by_step])
def test_ten_ranks_compile_what_one_does(backend: Backend, make: Callable[[Backend], Any]) -> None:
    # Two shapes: the last batch of an epoch is shorter. Ranks that get the new one together may all compile.
    train(**make(backend))
    assert_compiled(backend, calls=2 * -(-SAMPLES // BATCH), most=3)


def test_evaluation_is_compiled_once_more(backend: Backend) -> None:
    train(**as_instance(backend), evaluation=flowdp.EvaluationOptions((X[:50], Y[:50]), sanity_check=0))
    batches = 2 * -(-SAMPLES // BATCH) + 2 * -(-50 // BATCH)
    assert_compiled(backend, calls=batches, most=2 + 2 + RANKS)


@pytest.mark.parametrize("make", [as_instance, by_method, by_loss])
def test_exact_checks_its_loss_and_compiles_it(backend: Backend, make: Callable[[Backend], Any]) -> None:
    train(**make(backend), policy="exact", per_device_batch_size=40, epochs=3)
    assert counters["frames"]["total"] == counters["frames"]["ok"] > 0
    assert backend.calls > RANKS


@pytest.mark.parametrize("is_instance", [True, False])
def test_setup_compiles_behind_its_trial_of_the_model(backend: Backend, is_instance: bool) -> None:
    model = torch.compile(Net(), backend=backend) if is_instance else in_place(backend)
    with flowdp.setup(model, sgd(model.parameters()), devices=["cpu"] * RANKS) as dp:
        for rows in (80, 80, 60, 80):
            error(dp, (X[:rows], Y[:rows])).backward()
            dp.step()
    assert_compiled(backend, calls=4 * RANKS, most=3)  # one more if a share is one sample


def test_windows_of_setup_compile_once_for_all(backend: Backend) -> None:
    model = torch.compile(Net(), backend=backend)
    batches = [(X[:8], Y[:8])] * (2 * RANKS) + [(X[:6], Y[:6])] * RANKS
    with flowdp.setup(
        model,
        sgd(model.parameters()),
        devices=["cpu"] * RANKS,
        cadence=True,
        inputs=0,
        loss_fn=lambda context: F.cross_entropy(context.output, context.batch[1]),
    ) as dp:
        for window in dp.epoch(batches):
            dp.forward_batch(window)
            dp.step()
    assert_compiled(backend, calls=3 * RANKS, most=2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo checks a result's
def test_a_decorated_function_survives_the_trial_of_the_model(backend: Backend) -> None:
    double = torch.compile(lambda x: 2 * x, backend=backend)

    class Inside(Net):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = double(super().forward(x))
            return made

    model = Inside()
    with flowdp.setup(model, sgd(model.parameters()), devices=["cpu"] * 4) as dp:
        for _ in range(3):
            error(dp, (X[:32], Y[:32])).backward()
            dp.step()
    assert backend.calls == 3 * 4


def test_ddp_compiles_once_for_all(backend: Backend) -> None:
    models = [torch.compile(Net(), backend=backend) for _ in range(RANKS)]
    with flowdp.Ddp.wrap(models) as ddp:
        for rows in (8, 6, 8):
            ddp.parallel(lambda rank, model, rows=rows: error(model, (X[:rows], Y[:rows])).backward())
            ddp.all_reduce_gradients()
    assert_compiled(backend, calls=3 * RANKS, most=2)


def test_partition_ratios_say_that_nothing_is_compiled(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "flowdp"):
        train(
            **as_instance(backend),
            policy="exact",
            devices=["cpu", "cpu"],
            runtime=flowdp.RuntimeOptions(partition_ratios=[0.5, 0.5]),
        )
    assert backend.calls == 0
    assert "compiled without partition_ratios" in caplog.text
    model = torch.compile(Net(), backend=backend)
    model(X[:8])
    assert backend.calls == 1  # not uncompiled for good


def test_a_copy_is_compiled_as_its_original(backend: Backend) -> None:
    copy = copy_module(in_place(backend), torch.device("cpu"))
    copy(X[:3])
    assert backend.calls == 1
    plain = copy_module(Net(), torch.device("cpu"))
    assert plain._compiled_call_impl is None


def test_compiled_parts_are_found(backend: Backend) -> None:
    double = torch.compile(lambda x: 2 * x, backend=backend)
    inner = nn.Sequential(Net())
    inner.add_module("compiled", torch.compile(Net(), backend=backend))

    def closure(model: nn.Module, batch: Tensor) -> Tensor:
        made: Tensor = double(model(batch))
        return made

    nowhere = FunctionType(closure.__code__, {}, closure=closure.__closure__)
    assert nowhere.__module__ is None  # as for code run by `exec`, with names only
    assert all(uses_compile(one) for one in (closure, nowhere, inner, in_place(backend)))
    assert not uses_compile(error, Net(), nn.Sequential(Net()))


def test_functions_run_as_written_while_any_thread_says_so(backend: Backend) -> None:
    net = torch.compile(Net(), backend=backend)
    first, second = Uncompiled(), Uncompiled()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    net(X[:3])
    assert backend.calls == 0
    second.__exit__()
    net(X[:3])
    assert backend.calls == 1


def test_first_calls_take_turns(backend: Backend) -> None:
    net = torch.compile(Net(), backend=backend)
    first, second = FirstCalls(net), FirstCalls(net)
    entered = threading.Event()

    def other() -> None:
        with second.turn(8):
            entered.set()

    thread = threading.Thread(target=other)
    with first.turn(8):
        thread.start()
        with first.turn(8):  # not the first of its size
            assert not entered.is_set()
    thread.join(HANG_S)
    assert entered.is_set()


class Silent(RankMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


by_either_rule = pytest.mark.parametrize("by_stack", [True, False])
"""Whether dynamo checks the thread's modes, or, in torch 2.8, flags of the process."""
LOOKS_AT_STACK = hasattr(torch._dynamo.config, "inline_torch_dispatch_torch_compile")


def modes_are_found(by_stack: bool) -> AbstractContextManager[object]:
    """Let dynamo find modes by the thread's stack, or by the flags."""
    if LOOKS_AT_STACK:
        return torch._dynamo.config.patch(inline_torch_dispatch_torch_compile=by_stack)  # type: ignore[no-any-return]
    if by_stack:
        pytest.skip("dynamo of torch 2.8 looks at flags alone")
    return nullcontext()


@by_either_rule
def test_a_rank_compiles_beside_one_in_a_mode(backend: Backend, by_stack: bool) -> None:
    net = torch.compile(Net(), backend=backend)
    crew = Crew(["beside"])
    with closing(crew), modes_are_found(by_stack):
        mode = Silent()
        crew.run([mode.__enter__])
        net(X[:3])
        crew.run([partial(mode.__exit__, None, None, None)])
    assert backend.calls == 1


@pytest.mark.skipif(not LOOKS_AT_STACK, reason="torch 2.8 compiles again in a mode that sets no flag")
def test_what_is_compiled_does_not_run_past_a_mode(backend: Backend) -> None:
    """Guards would miss a mode of which they do not know."""
    net = torch.compile(Net(), backend=backend)
    net(X[:3])
    with Silent():
        with Silent():
            net(X[:3])
        net(X[:3])
    assert backend.calls == 1
