"""Tests of policy="exact": the parameters of one device with the big batch, on any devices."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flowdp
from flowdp import CollectiveError, current_worker
from flowdp.data.epoch_order import epoch_order
from flowdp.device.streams import StreamLane
from flowdp.policy.sharing import Exclusion, Sharing
from flowdp.replica.exact_replica import ExactReplica

SAMPLES, WINDOW, EPOCHS = 203, 20, 3  # 11 windows per epoch, the last of 3 samples
STEPS = 33
RATIOS: dict[int, tuple[float, ...] | None] = {1: None, 2: (0.7, 0.3), 3: (0.5, 0.4, 0.1), 4: (1, 2, 3, 4)}
# Where its batches lie changes no step; `test_however_it_is_read` has the ways of reading.
pytestmark = pytest.mark.parametrize("lanes", ["cpu", "streams"], indirect=True)

draw = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)
Y = torch.randn(SAMPLES, 2, generator=draw, dtype=torch.float64)
Make = Callable[[Any], Optimizer]


@pytest.fixture(autouse=True)
def watched_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch the gradients on the fake card, too: averaging and stepping must be ordered by events."""
    make = ExactReplica.__init__

    def watched(replica: ExactReplica, *args: Any, **options: Any) -> None:
        make(replica, *args, **options)
        if isinstance(replica.lane, StreamLane):
            replica.lane.device_module.watch(
                f"gradients of rank {replica.flat.rank}", *replica.averaged.memories
            )

    monkeypatch.setattr(ExactReplica, "__init__", watched)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 2)).double()


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def momentum(params: Any) -> Optimizer:
    return SGD(params, 0.05, momentum=0.9, weight_decay=0.01)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, 0.01)


def cosine(optimizer: Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, STEPS)


def windows(epochs: int = EPOCHS, window: int = WINDOW, seed: int = 0) -> Iterator[Tensor]:
    """Sample indices of each window of the run."""
    for epoch in range(epochs):
        yield from epoch_order(SAMPLES, seed, epoch).split(window)


def plain(
    model: nn.Module,
    make: Make,
    loss: Callable[..., Tensor] = mse,
    clip: float | None = None,
    clip_value: float | None = None,
    schedule: Callable[[Optimizer], Any] | None = None,
    steps: int | None = None,
    window: int = WINDOW,
    after: Callable[[Any], None] = lambda _: None,
) -> nn.Module:
    """Train on one device with the big batch; `after` is called with the model after each step."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    for index in itertools.islice(windows(window=window), steps):
        loss(model, (X[index], Y[index])).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad()
        after(model)
        if scheduler is not None:
            scheduler.step()
    return model


def exact(model: nn.Module, make: Make, devices: int, loss: Any = mse, **options: Any) -> flowdp.Run:
    given: dict[str, Any] = {
        "dataset": (X, Y),
        "per_device_batch_size": 4,
        "batch_size": WINDOW,
        "epochs": EPOCHS,
        "runtime": flowdp.RuntimeOptions(
            partition_ratios=RATIOS[devices], tune_process=flowdp.ProcessTuning(openmp=False)
        ),
        "progress": False,
        "failures": flowdp.FailureOptions(check_loss=False),
    } | options
    run = flowdp.Trainer(model, make, loss, devices=["cpu"] * devices, policy="exact", **given).start()
    run.join()
    return run


def apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def check_equal(run: flowdp.Run) -> None:
    """Assert that all replicas have the same bits."""
    first, *others = run._engine.replicas
    for other in others:
        for mine, theirs in zip(other.flat.memories, first.flat.memories, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


# ---------------------------------------------------------------- equal to one device
@pytest.mark.parametrize(
    ("make", "devices", "clip", "schedule"),
    [(momentum, 1, None, None), (momentum, 2, 0.1, None), (adamw, 4, None, cosine)],
)
def test_as_one_device(make: Make, devices: int, clip: float | None, schedule: Any) -> None:
    model = net()
    expected = plain(model, make, clip=clip, schedule=schedule)
    scheduled = {} if schedule is None else {"scheduler": flowdp.SchedulerOptions(schedule, unit="step")}
    run = exact(model, make, devices, max_grad_norm=clip, **scheduled)
    assert run.join().global_step == STEPS
    assert apart(model, expected) < 1e-12
    check_equal(run)


def test_a_rank_alone_with_nans_goes_on_from_the_others(
    lanes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its windows since the last meeting are lost; all replicas stay equal, and no number is odd."""
    if lanes != "cpu":
        pytest.skip("ranks on streams always share")
    for name, value in (("GAIN", math.inf), ("FIRST_TRIAL", 1)):
        monkeypatch.setattr(f"flowdp.policy.sharing.{name}", value)
    odd: list[int] = []
    lock = threading.Lock()

    def loss(model: nn.Module, batch: Any) -> Any:
        worker = current_worker()
        with lock:
            is_odd = not odd and worker.global_step > 5 and len(batch[0]) == WINDOW
            if is_odd:
                odd.append(worker.rank)
        return mse(model, batch) * (math.nan if is_odd else 1.0)

    model = net()
    with caplog.at_level(logging.WARNING, "flowdp"):
        run = exact(
            model, adamw, 2, loss, epochs=8, per_device_batch_size=WINDOW,
            runtime=flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False)),
        )  # fmt: skip
    state = run.join()
    assert odd
    [told] = [text for text in caplog.messages if "had NaN or infinite numbers" in text]
    assert told.startswith(f"rank {odd[0]} ")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert state.global_step == 8 * STEPS // EPOCHS
    check_equal(run)


class Trained:
    """The ranks that have a part in each step."""

    def __init__(self) -> None:
        self.ranks: defaultdict[int, set[int]] = defaultdict(set)
        self._lock = threading.Lock()

    def note(self) -> None:
        worker = current_worker()
        with self._lock:
            self.ranks[worker.global_step].add(worker.rank)


@pytest.mark.parametrize(
    ("make", "devices", "clip", "schedule"), [(momentum, 2, None, None), (adamw, 4, 0.1, cosine)]
)
def test_windows_of_one_rank_alone(
    monkeypatch: pytest.MonkeyPatch, make: Make, devices: int, clip: float | None, schedule: Any
) -> None:
    """In turns with windows that all ranks share, however long each way takes."""
    for name, value in (("GAIN", math.inf), ("FIRST_TRIAL", 1)):
        monkeypatch.setattr(f"flowdp.policy.sharing.{name}", value)
    # On a busy machine a rank may be slow, or now slow and now fast: it is shared with all the same.
    for name in ("policy.sharing.LONGER", "machine.exact_rounds.MOVING"):
        monkeypatch.setattr(f"flowdp.{name}", math.inf)
    model = net()
    expected = plain(model, make, clip=clip, schedule=schedule)
    trained = Trained()

    def loss(model: nn.Module, batch: Any) -> Any:
        trained.note()
        # Named weights are divided by in the step of one rank, too.
        return {"loss": mse(model, batch), "weight": len(batch[0])}

    options: dict[str, Any] = {
        "runtime": flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False))
    }
    if schedule is not None:
        options["scheduler"] = flowdp.SchedulerOptions(schedule, unit="step")
    run = exact(model, make, devices, loss, max_grad_norm=clip, callbacks=[flowdp.EMA(0.5)], **options)
    assert run.join().global_step == STEPS
    if not run._engine.replicas[0].lane.is_async:  # those always share
        assert {len(ranks) for ranks in trained.ranks.values()} >= {1, devices}
    assert apart(model, expected) < 1e-12
    check_equal(run)
    first, *others = [replica.average for replica in run._engine.replicas]
    for other in others:
        assert first is not None
        assert other is not None
        for name, average in first.named().items():
            assert torch.equal(average, other.named()[name])


@pytest.mark.parametrize("left_out", [0, 2])
def test_windows_without_a_device_that_is_left_out(monkeypatch: pytest.MonkeyPatch, left_out: int) -> None:
    """In turns with windows in which it has a part; its replica takes every step."""
    monkeypatch.setattr(Sharing, "plan", lambda _: False)

    def measured(self: Exclusion, *_: Any) -> None:
        self.out = frozenset() if self.out else frozenset({left_out})

    monkeypatch.setattr(Exclusion, "measured", measured)
    model = net()
    expected = plain(model, adamw, clip=0.1)
    trained = Trained()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        trained.note()
        return mse(model, batch)

    tuning = flowdp.RuntimeOptions(tune_process=flowdp.ProcessTuning(openmp=False))
    run = exact(model, adamw, 3, loss, max_grad_norm=0.1, runtime=tuning)
    assert run.join().global_step == STEPS
    assert {frozenset(ranks) for ranks in trained.ranks.values()} >= {
        frozenset({0, 1, 2}),
        frozenset({0, 1, 2}) - {left_out},
    }
    assert apart(model, expected) < 1e-12
    check_equal(run)


# ---------------------------------------------------------------- callbacks that write to the model


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


class Clamps(flowdp.Callback):
    """Writes to each device's model after each step."""

    def on_step(self, worker: Any, loss: Tensor | None) -> None:
        clamp(worker.model)


@pytest.mark.parametrize("devices", [1, 4])
def test_every_device_is_called_after_every_step(devices: int) -> None:
    """Also one without a part of the window, so that all have the model of one device."""
    model = net()
    expected = plain(model, momentum, after=clamp)
    run = exact(model, momentum, devices, callbacks=[Clamps()])
    assert run.join().global_step == STEPS
    assert apart(model, expected) < 1e-12
    for replica in run._engine.replicas:
        assert apart(replica.module, model) == 0.0


class Read(Dataset[Any]):
    """A dataset read sample by sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Read(), {}),
        (Read(), {"runtime": flowdp.RuntimeOptions(partition_ratios=None)}),
        (Read(), {"reading": flowdp.ReadingOptions(num_workers=2)}),
        (DataLoader(Read(), WINDOW, shuffle=True), {"batch_size": None}),
        (DataLoader(TensorDataset(X, Y), WINDOW, shuffle=True), {"batch_size": None}),
    ],
    ids=["read", "by speed", "processes", "loader", "loader of tensors"],
)
def test_however_it_is_read(dataset: Any, options: dict[str, Any]) -> None:
    model = net()
    expected = plain(model, adamw)
    run = exact(model, adamw, 3, dataset=dataset, **options)
    assert apart(model, expected) < 1e-12
    check_equal(run)


def test_batch_sizes_of_their_own_cut_the_parts() -> None:
    """And the default window is their sum."""
    model, sizes = net(), Counter[tuple[int, int]]()
    lock = threading.Lock()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with lock:
            sizes[current_worker().rank, len(batch[0])] += 1
            assert current_worker().samples == len(batch[0])
        return mse(model, batch)

    expected = plain(model, momentum)
    exact(
        model,
        momentum,
        2,
        loss,
        per_device_batch_size=(16, 4),
        batch_size=None,
        runtime=flowdp.RuntimeOptions(partition_ratios=(0.8, 0.2)),
    )
    assert apart(model, expected) < 1e-12
    assert sizes == {(0, 16): 30, (1, 4): 30, (0, 2): 3, (1, 1): 3}


# ---------------------------------------------------------------- bits


def float_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0].float()), batch[1].float())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_precision(precision: str) -> None:
    """The replicas have the same bits, and train like one device, as far as the precision allows."""
    model = net().float()

    def small(model: nn.Module, batch: Any) -> Tensor:
        return float_loss(model, batch) * 1e-2  # so that nothing overflows and no step is skipped

    def fast(params: Any) -> Optimizer:
        return SGD(params, 2.0, momentum=0.9)

    expected = plain(model, fast, small)
    run = exact(model, fast, 3, small, precision=precision, max_grad_norm=10.0)
    check_equal(run)
    assert apart(model, expected) < 0.02
    assert apart(model, net()) > 0.1


def test_an_overflow_on_one_rank_is_one_on_all() -> None:
    """Its step is skipped everywhere, the scale falls everywhere, and the run continues."""
    model = net().float()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = current_worker()
        value = float_loss(model, batch) * 1e-2
        return value * 1e30 if worker.rank == 1 and worker.global_step == 7 else value

    run = exact(model, momentum, 3, loss, precision="fp16", max_grad_norm=1.0)
    check_equal(run)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    scales = [replica.update.scaler.get_scale() for replica in run._engine.replicas if replica.update.scaler]
    assert scales == [2.0**15] * 3


def test_a_rank_without_samples_takes_every_step() -> None:
    """With its schedule, its optimizer state and, for fp16, its scale."""
    model = net()
    expected = plain(model, adamw, schedule=cosine, window=2, steps=STEPS)
    steps: Counter[int] = Counter()
    lock = threading.Lock()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with lock:
            steps[current_worker().rank] += 1
        return mse(model, batch)

    run = exact(
        model,
        adamw,
        3,
        loss,
        batch_size=2,
        max_steps=STEPS,
        runtime=flowdp.RuntimeOptions(partition_ratios=(0.9, 0.05, 0.05)),
        scheduler=flowdp.SchedulerOptions(cosine, unit="step"),
    )
    assert min(steps[rank] for rank in range(3)) == 0
    assert apart(model, expected) < 1e-12
    check_equal(run)
    assert len({replica.learning_rate.value for replica in run._engine.replicas}) == 1
    narrow = exact(net().float(), adamw, 3, float_loss, batch_size=2, max_steps=9, precision="fp16")
    check_equal(narrow)


# ---------------------------------------------------------------- weighted losses
@pytest.mark.parametrize(("devices", "size"), [(1, 1), (1, WINDOW), (3, 1)])
def test_a_weight_that_is_not_the_samples(devices: int, size: int) -> None:
    """A mean over tokens: over those with a target in each window, however it is split."""
    targets = torch.randint(-3, 2, (SAMPLES, 6), generator=torch.Generator().manual_seed(2)).clamp(min=-1)
    torch.manual_seed(1)
    model = nn.Embedding(8, 2).double()
    inputs = torch.arange(SAMPLES * 6).reshape(SAMPLES, 6) % 8

    def total(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        scores = model(batch[0]).flatten(0, 1)
        return F.cross_entropy(scores, batch[1].flatten(), ignore_index=-1), (batch[1] >= 0).sum()

    def weighted(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss, tokens = total(model, batch)
        return {"loss": loss, "weight": tokens}

    expected = copy.deepcopy(model)
    optimizer = momentum(expected.parameters())
    losses = []
    for index in windows():
        loss, _ = total(expected, (inputs[index], targets[index]))
        losses.append((loss.item(), (targets[index] >= 0).sum().item()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run = exact(model, momentum, devices, weighted, dataset=(inputs, targets), per_device_batch_size=size)
    assert any((targets[index] < 0).all() for index in range(SAMPLES)), "micro-batches without a token"
    assert apart(model, expected) < 1e-12
    for epoch, first in zip(run.history, range(0, len(losses), 11), strict=True):
        own = losses[first : first + 11]
        mean = sum(loss * tokens for loss, tokens in own) / sum(tokens for _, tokens in own)
        assert epoch.loss == pytest.approx(mean, rel=1e-12)


def test_a_window_without_any_weight_is_a_step_without_a_gradient() -> None:
    """As one device takes it: momentum and weight decay go on."""
    kept = torch.ones(SAMPLES, dtype=torch.float64)
    kept[next(windows())] = 0.0

    def masked(model: nn.Module, x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        each = F.mse_loss(model(x), y, reduction="none").mean(1)
        return (each * counts).sum() / counts.sum().clamp(min=1.0)

    model = net()
    expected = copy.deepcopy(model)
    optimizer = momentum(expected.parameters())
    for index in windows():
        masked(expected, X[index], Y[index], kept[index]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": masked(model, *batch), "weight": batch[2].sum()}

    exact(model, momentum, 2, loss, dataset=(X, Y, kept))
    assert apart(model, expected) < 1e-12


# ---------------------------------------------------------------- parameters without gradients
class Branches(nn.Module):
    """Uses one of its layers depending on the batch; and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 2) for _ in range(3))
        self.never = nn.Linear(1, 1)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        out = x.sum(1, keepdim=True) * 0.0
        for number, layer in enumerate(self.layers):
            chosen = which == number
            if chosen.any():
                out = out + layer(x) * chosen.unsqueeze(1)
        return out


@pytest.mark.parametrize("devices", [1, 3])
def test_a_layer_that_no_sample_of_a_window_takes_is_left_alone(devices: int) -> None:
    """Adam with decay changes a parameter whose gradient is zero, but not one whose gradient is None."""
    which = torch.zeros(SAMPLES, dtype=torch.int64)
    which[::40] = 1
    which[1::97] = 2
    torch.manual_seed(1)
    model = Branches().double()
    never = copy.deepcopy(model.never)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0], batch[2]), batch[1])

    def make(params: Any) -> Optimizer:
        return AdamW(params, 0.01, weight_decay=0.1)

    expected = copy.deepcopy(model)
    optimizer = make(expected.parameters())
    absent = 0
    for index in windows():
        loss(expected, (X[index], Y[index], which[index])).backward()
        absent += sum(layer.weight.grad is None for layer in expected.layers)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert absent > 10
    run = exact(model, make, devices, loss, dataset=(X, Y, which))
    assert apart(model, expected) < 1e-12
    assert apart(model.never, never) == 0.0
    check_equal(run)


def test_a_layer_that_only_a_masked_rank_has_taken_is_left_alone() -> None:
    model = Branches().double()
    layers = copy.deepcopy(model.layers)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        worker = current_worker()
        is_bad = worker.rank == 1 and worker.global_step == 3
        out = F.mse_loss(model(batch[0], torch.full((len(batch[0]),), int(is_bad))), batch[1])
        return out * float("nan") if is_bad else out

    run = exact(model, lambda params: AdamW(params, 0.01, weight_decay=0.1), 2, loss)
    assert apart(model.layers[0], layers[0]) > 0.0
    assert apart(model.layers[1], layers[1]) == 0.0
    check_equal(run)


# ---------------------------------------------------------------- errors
def test_replicas_that_differ_end_the_run() -> None:
    """Here a callback writes to one of them; so does broken memory."""

    class Writes(flowdp.Callback):
        def on_step(self, worker: Any, loss: Tensor | None) -> None:
            if worker.rank == 1:
                worker.model.get_parameter("0.bias").data[0] += 1e-9

    with pytest.raises(CollectiveError, match=r"the replicas differ after epoch 1.* of rank 1 are not those"):
        exact(net(), momentum, 3, callbacks=[Writes()])


@pytest.mark.parametrize(
    "options",
    [
        {"runtime": flowdp.RuntimeOptions(partition_ratios=(1, 30))},
        {"runtime": flowdp.RuntimeOptions(partition_ratios=None)},
        {"per_device_batch_size": 2},
    ],
)
def test_no_device_gets_a_single_sample_for_batch_norm(options: dict[str, Any]) -> None:
    seen: set[int] = set()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.add(len(batch[0]))
        return mse(model, batch)

    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    exact(model, momentum, 2, loss, epochs=1, **options)  # the last window has 3 samples
    assert min(seen) >= 2
    assert 3 in seen


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 2)
    ).double()


@pytest.mark.usefixtures("kept_replicas")
@pytest.mark.parametrize("devices", [1, 3])
def test_batch_norm_over_all_devices(devices: int) -> None:
    """The parts of the windows have unequal sizes, and one rank has no part of the last one."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(normed())
    run = exact(model, momentum, devices, per_device_batch_size=WINDOW, max_grad_norm=1.0)
    wanted = plain(normed(), momentum, clip=1.0)
    assert apart(model, wanted) < 1e-10
    assert [type(layer) for layer in model].count(nn.SyncBatchNorm) == 2
    assert all("forward" not in layer.__dict__ for layer in model)
    check_equal(run)


def test_with_fixed_shares_dropout_repeats_and_follows_the_seed() -> None:
    def run(seed: int) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.Linear(16, 2)).double()
        exact(model, momentum, 3, epochs=1, seed=seed)
        torch.rand(7)  # the process's own generator does not matter
        return model

    first, again, other = run(3), run(3), run(4)
    assert apart(first, again) == 0
    assert apart(first, other) > 0
