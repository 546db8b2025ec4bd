"""Tests of the Trainer: arguments, refusals, results."""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, random_split

from bench.cadences import cadence_for
from flowdp import (
    EarlyStopping,
    FailureOptions,
    OptionError,
    ProcessTuning,
    ReadingOptions,
    RuntimeOptions,
    SchedulerOptions,
    StepError,
    Trainer,
    current_worker,
    record_scalar,
)

pytestmark = pytest.mark.usefixtures("stopped_runs")

POLICIES = ["sync", "cadence", "async"]
SAMPLES = 60
DATA = (torch.arange(float(SAMPLES)).unsqueeze(1) / SAMPLES, torch.ones(SAMPLES, 1))


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01)


def trainer(**options: Any) -> Trainer:
    given: dict[str, Any] = {
        "policy": "cadence", "model": nn.Linear(1, 1), "optimizer": sgd, "loss": mse, "dataset": DATA,
        "per_device_batch_size": 4,
        "epochs": 2, "devices": 2,
        "cadence": cadence_for(options.get("policy", "cadence"), anchor=3, max_anchor=3),
    } | options  # fmt: skip
    return Trainer(**given)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flowdp-")]


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


# ---------------------------------------------------------------- refusals by the constructor


OPTIMIZER = sgd(nn.Linear(1, 1).parameters())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": OPTIMIZER, "model": two_layers}, "with a model factory, give an optimizer factory"),
        ({"dataset": []}, "the dataset is empty"),
        ({"per_device_batch_size": None}, "batch_size is missing"),
        ({"epochs": None}, "epochs, max_steps or max_time must say how long to train"),
        ({"devices": ["cuda:99"]}, "'cuda:99' is not here: this machine has "),
        ({"max_grad_norm": 1, "max_grad_value": 1}, "clip the same gradients"),
        (
            {"scheduler": SchedulerOptions(StepLR(OPTIMIZER, 1), unit="step")},
            "made for the optimizer instance",
        ),
        ({"resume": True}, "resume=True takes the newest checkpoint of the folder: give checkpoint="),
        ({"callbacks": [EarlyStopping(), EarlyStopping("a")]}, "has one EarlyStopping"),
        (
            {"failures": FailureOptions(on_failure="continue"), "policy": "async"},
            "under 'async' the steps of a rank since the last mean",
        ),
        (
            {"failures": FailureOptions(on_failure="continue"), "devices": 1},
            "needs another device to go on with",
        ),
    ],
)
def test_what_is_refused_when_it_is_made(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        trainer(**options).check()
    assert threads() == []


JUNK: list[Any] = [
    3,
    3.5,
    -1,
    0,
    True,
    "x",
    "",
    object(),
    [],
    {},
    [3],
    ["x"],
    math.nan,
    b"x",
    torch.ones(3),
    nn.Flatten(),
]


def complaint(**options: Any) -> str | None:
    try:
        trainer(**options).check()
    except OptionError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", list(inspect.signature(Trainer).parameters))
def test_an_argument_of_any_kind_is_taken_or_named(name: str) -> None:
    beside: dict[str, Any] = {}
    if name == "train_step":
        beside = {"loss": None}
    for value in JUNK:
        said = complaint(**beside, **{name: value})
        assert said is None or name in said, f"{name}={value!r}: {said}"


# ---------------------------------------------------------------- refusals before a thread starts
def shapes(*sizes: int) -> Callable[[], nn.Module]:
    left = list(sizes)
    return lambda: nn.Linear(1, left.pop(0))


ONE_MODULE = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"model": shapes(1, 2)},
            "'weight' is float32 \\(2, 1\\) on rank 1 and float32 \\(1, 1\\) on rank 0",
        ),
        ({"model": lambda: ONE_MODULE}, "same module for rank 1 and an earlier rank"),
        ({"model": nn.LazyLinear(1)}, "has no shape yet; run one batch"),
        ({"model": nn.ReLU()}, "nothing to train"),
        ({"optimizer": OPTIMIZER}, "2 parameters that are not the model's"),
        ({"optimizer": lambda params: sgd(ONE_MODULE.parameters())}, "parameters of another model"),
        ({"scheduler": SchedulerOptions(lambda opt: ReduceLROnPlateau(opt), unit="step")}, "must be 'epoch'"),
    ],
)
def test_what_is_refused_before_a_thread_starts(
    options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    with pytest.raises(OptionError, match=match):
        trainer(**options).start()
    assert started == []


def test_what_belongs_to_the_run_says_so() -> None:
    own: Any = trainer()
    for name in ("join", "metrics", "stop"):
        with pytest.raises(
            AttributeError, match=rf"no attribute '{name}': .*trainer\.start\(\); run\.{name}"
        ):
            getattr(own, name)
    with pytest.raises(AttributeError, match=r"no attribute 'epoch'$"):
        own.epoch  # noqa: B018 - the attribute is what is tested


class Named(Dataset[Any]):
    """Samples with names."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": DATA[0][index], "y": DATA[1][index]}


@pytest.mark.parametrize("policy", ["exact", "sync"])
def test_an_error_of_the_first_step_describes_the_batch(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StepError) as caught:
        trainer(policy=policy, dataset=Named(), per_device_batch_size=4, epochs=1).fit()
    text = str(caught.value)
    assert "KeyError: 0 (batch['x'] is float32 tensor (4, 1), batch['y'] is float32 tensor (4, 1))" in text
    assert "lambda" not in text
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__traceback__ is not None
    assert caught.value.__cause__.__traceback__.tb_frame.f_code is mse.__code__
    assert "could not be checked" not in caplog.text


def output_and_target(output: Any, target: Any) -> Tensor:
    return ((output - target) ** 2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ["exact", "sync"])
def test_a_loss_of_output_and_target_is_told_what_to_write(policy: str) -> None:
    for dataset, places in ((DATA, ("0", "1")), (Named(), ("'x'", "'y'"))):
        with pytest.raises(StepError, match=r"unsupported operand .*loss=lambda model, batch: ") as caught:
            trainer(policy=policy, dataset=dataset, loss=output_and_target).fit()
        call = "output_and_target(model(batch[{}]), batch[{}])".format(*places)
        assert str(caught.value).endswith(call)


def test_a_later_error_does_not_describe_the_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = current_worker()
        assert worker is not None
        if worker.local_step == 2:
            raise KeyError(0)
        return mse(model, batch)

    with pytest.raises(StepError, match=r"KeyError: 0$"):
        trainer(loss=loss).fit()


@pytest.mark.parametrize("what", ["model", "optimizer", "scheduler"])
def test_a_factory_that_raises_on_one_device(what: str, tmp_path: Path) -> None:
    calls = Counter[str]()
    interval = sys.getswitchinterval()

    def factory(given: Any = None) -> Any:
        calls["all"] += 1
        if calls["all"] == 2:
            raise ZeroDivisionError("no second one")
        made = {
            "model": lambda: nn.Linear(1, 1),
            "optimizer": lambda: sgd(given),
            "scheduler": lambda: StepLR(given, 1),
        }
        return made[what]()

    options: dict[str, Any] = {
        what: SchedulerOptions(factory, unit="epoch") if what == "scheduler" else factory,
    }
    job = trainer(**options)
    with pytest.raises(ZeroDivisionError, match="no second one"):
        job.start()
    assert threads() == []
    assert sys.getswitchinterval() == interval
    assert job.fit().epochs_done == 2  # the next start is a new one


# ---------------------------------------------------------------- samples trained


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return DATA[0][index], DATA[1][index]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 30),
        ({"max_steps": 7}, 7),
        ({"epochs": None, "max_steps": 40}, 40),
        ({"limit_batches": 5}, 10),
        ({"policy": "exact"}, 16),
        ({"policy": "sync", "per_device_batch_size": [4, 8]}, 20),
        ({"policy": "sync", "gradient_accumulation_steps": 3}, 10),
        ({"per_device_batch_size": 7, "reading": ReadingOptions(drop_last=True)}, 16),
        ({"dataset": {"x": DATA[0], "y": DATA[1]}, "loss": lambda m, b: mse(m, (b["x"], b["y"]))}, 30),
        ({"dataset": Squares(), "reading": ReadingOptions(num_workers=1)}, 30),
        (
            {
                "policy": "cadence",
                "dataset": DataLoader(Squares(), 16, num_workers=2),
                "per_device_batch_size": None,
            },
            16,
        ),
        ({"loss": nn.MSELoss()}, 30),
        ({"runtime": RuntimeOptions(tune_process=ProcessTuning(openmp=False))}, 30),
        ({"runtime": RuntimeOptions(tune_process=False)}, 30),
        ({"runtime": RuntimeOptions(partition_ratios=[3, 1])}, 30),
    ],
)
def test_how_long_it_trains(options: dict[str, Any], steps: int) -> None:
    job = trainer(**options)
    assert job.total_steps == steps
    state = job.fit()
    assert state.global_step == steps
    assert not state.interrupted


def test_an_optimizer_instance_with_groups() -> None:
    model = two_layers()
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.01}]
    )
    mse(model, DATA).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = trainer(model=model, optimizer=optimizer, devices=1, epochs=1).fit()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])
    assert [group["lr"] for group in state.optimizer_state["param_groups"]] == [0.0, 0.01]
    assert state.optimizer_state["state"][0]["step"] == 1 + 15  # its own steps, and those of the run
    assert optimizer.state[model[0].weight]["step"] == 1
    assert model[0].weight.grad is None


# ---------------------------------------------------------------- reported losses
@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_of_the_loss_are_means_over_the_epoch(policy: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        record_scalar("x", batch[0].mean())
        record_scalar("heavy", 1.0 if current_worker().samples == 4 else 0.0, weight=1.0)
        return {"loss": mse(model, batch), "first": batch[0].mean() * 2}

    data = (DATA[0][:30], DATA[1][:30])  # 7 batches of 4, and one of 2
    for epoch in trainer(loss=loss, dataset=data, policy=policy).fit().history:
        mean = data[0].mean().item()
        assert epoch.scalars["x"] == pytest.approx(mean, rel=1e-5)
        assert epoch.scalars["first"] == pytest.approx(2 * mean, rel=1e-5)
        assert epoch.scalars["heavy"] == pytest.approx(7 / 8)
        assert "x " in str(epoch)


@pytest.mark.parametrize("policy", ["sync", "exact"])
def test_a_rank_that_leaves_autocast_is_of_no_account_to_the_others(policy: str) -> None:
    """It empties the process's cache of casts; a weight cast twice gets other gradients than one cast
    once.
    """

    def trained(*, is_emptied: bool) -> Tensor:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            hidden = model(batch[0]).tanh()
            if is_emptied:
                torch.clear_autocast_cache()
            out: Tensor = model(hidden)
            return out.float().square().mean()

        torch.manual_seed(0)
        model = nn.Linear(33, 33, bias=False)
        fixed = {"runtime": RuntimeOptions(partition_ratios=[1, 1])} if policy == "exact" else {}
        trainer(
            model=model, loss=loss, dataset=(torch.randn(64, 33),), precision="bf16", policy=policy, **fixed
        ).fit()
        return model.weight.detach()

    assert torch.equal(trained(is_emptied=False), trained(is_emptied=True))


# ---------------------------------------------------------------- datasets that share a file
class Shared(Dataset[Any]):
    """Sample i is (i, item i of the file), read through one handle: seek, then read.

    In read number `waits_at` a thread waits between the two for a while, for another one to read.
    """

    def __init__(self, path: Path, samples: int, waits_at: int) -> None:
        path.write_bytes(bytes(range(samples)))
        self.samples, self.waits_at, self.reads = samples, waits_at, 0
        self.file = path.open("rb", buffering=0)
        self.reader: threading.Thread | None = None
        self.other_reads = threading.Event()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[float, float]:
        self.file.seek(index)
        self.reads += 1
        if self.reads == self.waits_at:
            self.reader = threading.current_thread()
            self.other_reads.wait(0.3)
        elif self.reader not in (None, threading.current_thread()):
            self.other_reads.set()
        return float(index), float(self.file.read(1)[0])


def test_an_evaluation_and_the_reading_ahead_share_a_file(tmp_path: Path) -> None:
    """While epoch 0 is evaluated, its reader is in epoch 1."""
    shared = Shared(tmp_path / "samples", 32, waits_at=25)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        index, value = batch
        record_scalar("wrong", (index != value).double().sum())
        return model(value.float().unsqueeze(1)).square().mean()

    train, rest = random_split(shared, [24, 8])
    epochs = list(trainer(loss=loss, dataset=train, evaluation=rest).start().metrics())
    assert [metrics.scalars["wrong"] for metrics in epochs] == [0.0, 0.0]
    assert [metrics.eval["wrong"] for metrics in epochs] == [0.0, 0.0]
    shared.file.close()
