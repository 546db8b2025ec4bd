"""A replica that leaves the numbers: seen before it gives anything to a mean, and left out or told."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp import StepError, current_worker
from flowdp.device.gradients import SharedGradients, Touched
from flowdp.device.streams import CudaLane, HostLane
from flowdp.device.tensors import FlatReplica
from flowdp.engine.context import CurrentWorker
from flowdp.engine.finite import Finite, Numbers
from flowdp.engine.learning_rate import LearningRate
from flowdp.engine.meter import HostMeter
from flowdp.engine.place import Place
from flowdp.engine.replica import Replica
from flowdp.machine.worker import Step, WorkerMachine
from tests.fakes import FakeCuda, FakeEvent
from tests.loops import numbers

CPU = torch.device("cpu")
BAD = [math.nan, math.inf, -math.inf]


class Mixed(nn.Module):
    """Parameters of several dtypes, and a mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(70, dtype=torch.float64))
        self.plain = nn.Parameter(torch.ones(1000))
        self.small = nn.Parameter(torch.ones(33, dtype=torch.float16))
        self.brain = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("count", torch.tensor(3))


@pytest.fixture(params=["host", "device"])
def finite(request: pytest.FixtureRequest) -> Finite:
    return Finite(HostLane(CPU) if request.param == "host" else CudaLane(CPU, FakeCuda()))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["wide", "plain", "small", "brain", "wave"])
def test_one_bad_number_is_found(finite: Finite, name: str, bad: float) -> None:
    module = Mixed()
    flat = FlatReplica(module)
    assert finite(flat)
    module.get_parameter(name).data[-1] = bad
    assert not finite(flat)


@pytest.mark.parametrize(
    ("name", "large"),
    [("wide", 1.7e308), ("plain", 3e38), ("small", 65504.0), ("brain", 3.3e38), ("wave", 3e38)],
)
def test_large_numbers_are_numbers(finite: Finite, name: str, large: float) -> None:
    """Their sum overflows."""
    module = Mixed()
    flat = FlatReplica(module)
    module.get_parameter(name).data.fill_(large)
    assert finite(flat)
    module.get_parameter(name).data[0] = math.nan
    assert not finite(flat)


def test_of_gradients_the_gradients_count() -> None:
    module = nn.Linear(3, 2)
    gradients, finite = SharedGradients(FlatReplica(module), module, Touched(1)), Finite(HostLane(CPU))
    module.weight.data.fill_(math.nan)
    gradients.gather()
    assert finite(gradients)
    assert module.bias.grad is not None
    module.bias.grad[1] = math.inf
    assert not finite(gradients)


def test_the_host_waits_for_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    finite, order = Finite(CudaLane(CPU, FakeCuda())), list[str]()
    synchronize, read = FakeEvent.synchronize, Tensor.__float__
    monkeypatch.setattr(
        FakeEvent, "synchronize", lambda event: (order.append("waits"), synchronize(event))[1]
    )
    monkeypatch.setattr(Tensor, "__float__", lambda tensor: (order.append("reads"), read(tensor))[1])
    assert finite(FlatReplica(nn.Linear(3, 2)))
    assert order == ["waits", "reads"]


@pytest.mark.parametrize("on_nan", ["raise", "quarantine"])
def test_a_loss_that_is_seen_late_is_told_of_its_own_step(on_nan: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    module, lane = nn.Linear(1, 1), HostLane(CPU)
    replica = Replica(module, FlatReplica(module), [optimizer], mse, LearningRate([optimizer]), lane)
    source: Any = None
    current = CurrentWorker(1, CPU, module, sink=lambda *_: None)
    machine, meter, place = WorkerMachine(1), HostMeter(), Place(current, lane, source)
    numbers = Numbers(replica, machine, meter, place, on_nan)
    early, late = Step(2, (7, 8), 0), Step(2, (9, 10), 1)
    meter.end(torch.tensor(math.nan), 4, early)
    place.step, machine.steps = late, 2
    with pytest.raises(FloatingPointError) if on_nan == "raise" else nullcontext():
        numbers.look()
    assert machine.is_bad == (on_nan == "quarantine")
    assert numbers.bad == ((2, 7) if machine.is_bad else None)
    assert place.step is (early if on_nan == "raise" else late)


# ---------------------------------------------------------------- in a run
SAMPLES = 24
X = torch.cat([torch.arange(float(SAMPLES), dtype=torch.float64).unsqueeze(1), numbers(SAMPLES, 5)], 1)
Y = numbers(SAMPLES, 3, seed=7)


class InfiniteBehind(torch.autograd.Function):
    """A finite loss with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * math.inf


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0][:, 1:]), batch[1])


class Trouble:
    """A loss that leaves the numbers once, with a sample of the first epoch."""

    def __init__(self, sample: int, behind: bool) -> None:
        self.sample, self.behind = sample, behind

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = mse(model, batch)
        if current_worker().epoch or self.sample not in batch[0][:, 0].long().tolist():
            return loss
        return InfiniteBehind.apply(loss) if self.behind else loss * math.nan


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def start(loss: Any, **options: Any) -> flowdp.Run:
    given: dict[str, Any] = {
        "model": mlp, "dataset": (X, Y), "batch_size": 4, "epochs": 2, "policy": "sync", "progress": False,
        "shuffle": False, "devices": ["cpu", "cpu"], "optimizer": lambda params: torch.optim.SGD(params, 0.1),
    } | options  # fmt: skip
    return flowdp.Trainer(loss=loss, **given).start()


def by_hand() -> dict[str, Tensor]:
    """Two epochs of three rounds of two batches; in the second round that of rank 1 has no part."""
    module = mlp()
    for turn in range(6):
        rows = [slice(8 * (turn % 3) + 4 * rank, 8 * (turn % 3) + 4 * rank + 4) for rank in range(2)]
        rows = rows[: 1 if turn == 1 else 2]
        stepped = []
        for part in rows:
            replica = copy.deepcopy(module)
            mse(replica, (X[part], Y[part])).backward()
            for parameter in replica.parameters():
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad, alpha=0.1)
            stepped.append([parameter.detach() for parameter in replica.parameters()])
        for parameter, column in zip(module.parameters(), zip(*stepped, strict=True), strict=True):
            parameter.data = torch.stack(column).mean(0)  # one step of SGD: of gradients it is the same mean
    return module.state_dict()


EXACT = {"policy": "exact", "global_batch_size": 8, "partition_ratios": [0.5, 0.5]}


@pytest.mark.parametrize("behind", [False, True], ids=["loss", "gradient"])
@pytest.mark.parametrize("options", [{}, EXACT], ids=["sync", "exact"])
def test_the_mean_does_without_a_replica_gone_bad(
    lanes: str, options: dict[str, Any], behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int] | None] = []
    left = Numbers.left

    def watched(self: Numbers, step: Step, what: str) -> None:
        left(self, step, what)
        seen.append(self.bad)

    monkeypatch.setattr(Numbers, "left", watched)
    run = start(Trouble(13, behind), **options)
    found = run.join().state_dict
    for name, tensor in by_hand().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-13)
    assert all(math.isfinite(epoch.loss) for epoch in run.history)
    assert set(seen) == {(0, 1 if options else 3)}


@pytest.mark.parametrize(
    ("policy", "behind"),
    # Where another step follows in the round, its loss tells.
    [
        ("sync", False),
        ("sync", True),
        ("exact", False),
        ("exact", True),
        ("cadence", False),
        ("async", False),
    ],
)
def test_it_ends_the_run_where_that_is_asked(policy: str, behind: bool) -> None:
    run = start(Trouble(13, behind), policy=policy, on_nan="raise")
    with pytest.raises(StepError) as caught:
        run.join(20)
    error = caught.value
    what = "what the step made of it is not finite" if behind else "the loss is not finite"
    assert what in str(error)
    assert error.epoch == 0
    assert 13 in error.indices
    assert isinstance(error.__cause__, FloatingPointError)


def test_what_a_gradient_scaler_leaves_out_is_not_bad() -> None:
    """An overflow of the scaled loss; in exact, the mean of all ranks' has it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0][:, 1:].float()).float().mean() * 1e33

    def small() -> nn.Module:
        torch.manual_seed(3)
        return nn.Linear(5, 1)

    for options in ({}, EXACT):
        state = start(loss, model=small, precision="fp16", on_nan="raise", **options).join()
        assert all(bool(tensor.isfinite().all()) for tensor in state.state_dict.values())
