"""Tests of NaN or inf parameters: found before they are averaged, and the replica healed or the error
raised.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from flowdp import StepError, current_worker
from flowdp.device.flat_gradients import SharedGradients
from flowdp.device.flat_parameters import FlatReplica, FlatTensors
from flowdp.device.streams import HostLane
from flowdp.device.worker_context import CurrentWorker
from flowdp.engine.error_context import ErrorContext
from flowdp.engine.meter import Meter
from flowdp.engine.nan_guard import NanGuard, note_nonfinite
from flowdp.machine.worker import Step, WorkerMachine
from flowdp.replica.replica import Replica
from tests.limits import HANG_S
from tests.loops import numbers
from tests.parts import parts_of

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


Look = Callable[[FlatTensors], bool]


def is_not_odd(tensors: FlatTensors) -> bool:
    out = torch.tensor(True)
    note_nonfinite(tensors.trained(), None, out)
    return not out


@pytest.fixture(params=[FlatTensors.is_finite, is_not_odd], ids=["host", "device"])
def finite(request: pytest.FixtureRequest) -> Look:
    look: Look = request.param
    return look


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["wide", "plain", "small", "brain", "wave"])
def test_one_bad_number_is_found(finite: Look, name: str, bad: float) -> None:
    module = Mixed()
    flat = FlatReplica(module)
    assert finite(flat)
    module.get_parameter(name).data[-1] = bad
    assert not finite(flat)


def test_of_gradients_the_gradients_count(finite: Look) -> None:
    module = nn.Linear(3, 2)
    gradients = SharedGradients(FlatReplica(module))
    module.weight.data.fill_(math.nan)
    gradients.gather()
    assert finite(gradients)
    assert module.bias.grad is not None
    module.bias.grad[1] = math.inf
    assert not finite(gradients)


@pytest.mark.parametrize("bad", BAD)
def test_a_loss_counts_beside_finite_parameters(bad: float) -> None:
    out = torch.tensor(False)
    for parts in ([], [torch.ones(3)]):
        note_nonfinite(parts, torch.tensor(bad, dtype=torch.float64), out)
        assert out
        note_nonfinite(parts, torch.tensor(3.0, dtype=torch.float64), out)
        assert not out


@pytest.mark.parametrize("on_nan", ["raise", "quarantine"])
def test_a_loss_that_is_seen_late_is_told_of_its_own_step(on_nan: Any) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    module, lane = nn.Linear(1, 1), HostLane(CPU)
    replica = Replica(parts_of(module, optimizer, lane), mse)
    source: Any = None
    current = CurrentWorker(1, CPU, module, sink=lambda *_: None)
    machine, meter, place = WorkerMachine(1), Meter(lane), ErrorContext(current, source)
    numbers = NanGuard(replica, machine, meter, place, on_nan, is_late=False)
    early, late = Step(2, (7, 8), 0), Step(2, (9, 10), 1)
    meter.end(torch.tensor(math.nan), 4, early)
    place.step, machine.steps = late, 2
    with pytest.raises(FloatingPointError) if on_nan == "raise" else nullcontext():
        numbers.check_losses()
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
    """A loss that gives NaN once for each of these samples, in the first epoch."""

    def __init__(self, *samples: int, behind: bool) -> None:
        self.samples, self.behind = set(samples), behind

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = mse(model, batch)
        if current_worker().epoch or self.samples.isdisjoint(batch[0][:, 0].long().tolist()):
            return loss
        return InfiniteBehind.apply(loss) if self.behind else loss * math.nan


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def start(loss: Any, **options: Any) -> flowdp.Run:
    given: dict[str, Any] = {
        "model": mlp,
        "dataset": (X, Y),
        "per_device_batch_size": 4,
        "epochs": 2,
        "policy": "sync",
        "progress": False,
        "reading": flowdp.ReadingOptions(shuffle=False),
        "devices": ["cpu", "cpu"],
        "optimizer": lambda params: torch.optim.SGD(params, 0.1),
    } | options
    return flowdp.Trainer(loss=loss, **given).start()


def by_hand(left_out: Sequence[int] = (1,)) -> dict[str, Tensor]:
    """Two epochs of three rounds of two batches; rank 1's batch is left out in these rounds."""
    module = mlp()
    for turn in range(6):
        rows = [slice(8 * (turn % 3) + 4 * rank, 8 * (turn % 3) + 4 * rank + 4) for rank in range(2)]
        rows = rows[: 1 if turn in left_out else 2]
        stepped = []
        for part in rows:
            replica = copy.deepcopy(module)
            mse(replica, (X[part], Y[part])).backward()
            for parameter in replica.parameters():
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad, alpha=0.1)
            stepped.append([parameter.detach() for parameter in replica.parameters()])
        for parameter, column in zip(module.parameters(), zip(*stepped, strict=True), strict=True):
            parameter.data = torch.stack(column).mean(0)  # one SGD step: equal to the mean of gradients
    return module.state_dict()


EXACT = {
    "policy": "exact",
    "batch_size": 8,
    "runtime": flowdp.RuntimeOptions(partition_ratios=[0.5, 0.5]),
}


on_streams = pytest.mark.parametrize("lanes", ["streams"], indirect=True)
on_both = pytest.mark.parametrize("options", [{}, EXACT], ids=["sync", "exact"])


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The reports of replicas that are not finite."""
    return [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]


@pytest.mark.parametrize("behind", [False, True], ids=["loss", "gradient"])
@on_both
def test_the_mean_does_without_a_replica_gone_bad(
    lanes: str, options: dict[str, Any], behind: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(Trouble(13, behind=behind), **options)
    found = run.join().state_dict
    # A host that hears of it from its device tells the next gate, and is healed behind that.
    is_told_late = lanes != "cpu" and not options
    for name, tensor in by_hand((1, 2) if is_told_late else (1,)).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-13)
    assert all(math.isfinite(epoch.loss) for epoch in run.history)
    [text] = told(caplog)
    assert f"batch {2 if options else 4} of epoch 1" in text


@pytest.mark.parametrize(
    ("policy", "behind"),
    # If another step follows in the round, its loss shows it.
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
    run = start(Trouble(13, behind=behind), policy=policy, failures=flowdp.FailureOptions(on_nan="raise"))
    with pytest.raises(StepError) as caught:
        run.join(HANG_S)
    error = caught.value
    what = "parameters or buffers have NaN or inf after the step" if behind else "the loss is not finite"
    assert what in str(error)
    assert error.epoch == 0
    assert 13 in error.indices
    assert isinstance(error.__cause__, FloatingPointError)


@on_streams
@on_both
@pytest.mark.parametrize(
    ("behind", "sample", "epochs"),
    [(False, 13, 2), (True, 5, 2), (True, 13, 1), (True, 21, 1), (False, 21, 2)],
)
def test_the_device_leaves_it_out_wherever_it_happens(
    lanes: str,
    options: dict[str, Any],
    behind: bool,
    sample: int,
    epochs: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the first round, in the middle, and in the last one, which no gate follows."""
    run = start(Trouble(sample, behind=behind), epochs=epochs, optimizer=adam, **options)
    state = run.join(HANG_S)
    assert all(bool(tensor.isfinite().all()) for tensor in state.state_dict.values())
    [text] = told(caplog)
    assert f"batch {sample // (8 if options else 4) + 1} of epoch 1" in text


@on_streams
def test_a_window_of_one_rank_that_is_bad_is_left_out(lanes: str, caplog: pytest.LogCaptureFixture) -> None:
    """The others are not bad, and the run goes on from what it was."""
    data = {"dataset": (torch.cat([X, X])[:25], torch.cat([Y, Y])[:25])}
    data["dataset"][0][:, 0] = torch.arange(25.0)
    found = start(Trouble(24, behind=True), optimizer=adam, epochs=1, **EXACT, **data).join(HANG_S).state_dict
    [text] = told(caplog)
    assert "batch 4 of epoch 1" in text
    without = {"dataset": tuple(part[:24] for part in data["dataset"])}
    expected = start(mse, optimizer=adam, epochs=1, **EXACT, **without).join(HANG_S).state_dict
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


@on_streams
def test_under_exact_each_is_told_once_and_the_hosts_stay_ahead(
    lanes: str, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no replica to heal: the gradients of the others make all the same step."""
    run = start(Trouble(1, 13, 17, behind=True), optimizer=adam, epochs=2, **EXACT)
    guards = [worker._numbers for worker in run._engine._parts.workers]
    run.join(HANG_S)
    assert sorted(text.split(". ")[0][:6] for text in told(caplog)) == ["rank 0", "rank 0", "rank 1"]
    assert all(guard._is_late for guard in guards)


@on_streams
@pytest.mark.parametrize("options", [{}, {"policy": "cadence"}, EXACT], ids=["sync", "cadence", "exact"])
def test_all_at_once_end_the_run(lanes: str, options: dict[str, Any]) -> None:
    run = start(Trouble(*range(SAMPLES), behind=True), epochs=5, optimizer=adam, **options)
    with pytest.raises(flowdp.FlowdpError, match="NaN or infinite numbers in every replica"):
        run.join(HANG_S)


@on_streams
@on_both
@pytest.mark.usefixtures("kept_replicas")
@pytest.mark.parametrize("epochs", [1, 2])
def test_an_error_that_is_late_names_its_step_and_has_spoilt_nothing(
    lanes: str, options: dict[str, Any], epochs: int
) -> None:
    run = start(
        Trouble(13 if epochs == 2 else 21, behind=True),
        failures=flowdp.FailureOptions(on_nan="raise"),
        epochs=epochs,
        **options,
    )
    with pytest.raises(StepError, match="the mean of that round was taken without it") as caught:
        run.join(HANG_S)
    assert (13 if epochs == 2 else 21) in caught.value.indices
    assert "parameters or buffers have NaN or inf after the step" in str(caught.value)
    for replica in run._engine.replicas:
        assert all(bool(tensor.isfinite().all()) for tensor in replica.module.state_dict().values())


@on_streams
def test_where_the_others_go_on_an_error_comes_before_the_mean(lanes: str) -> None:
    """Batches not averaged are dealt again, so their mean must not have been held."""
    run = start(
        Trouble(13, behind=True),
        failures=flowdp.FailureOptions(on_nan="raise", on_failure="continue"),
        max_steps=24,
        epochs=None,
    )
    with pytest.raises(StepError) as caught:
        run.join(HANG_S)
    assert "the mean of that round" not in str(caught.value)


def adam(params: Any) -> torch.optim.Optimizer:
    """Adam: its state does not recover by itself."""
    return torch.optim.Adam(params, 0.01)


def test_what_a_gradient_scaler_leaves_out_is_not_bad() -> None:
    """An overflow of the scaled loss; with exact, in the sum of all ranks."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0][:, 1:].float()).float().mean() * 1e33

    def small() -> nn.Module:
        torch.manual_seed(3)
        return nn.Linear(5, 1)

    for options in ({}, EXACT):
        state = start(
            loss, model=small, precision="fp16", failures=flowdp.FailureOptions(on_nan="raise"), **options
        ).join()
        assert all(bool(tensor.isfinite().all()) for tensor in state.state_dict.values())
