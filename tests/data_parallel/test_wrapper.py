"""Tests of `setup`: a user's loop gives the same results on several devices as on one."""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import register_dataclass
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import flowdp
from flowdp import CadenceOptions, DataParallel, OptionError
from flowdp.collective.batch_norm import PARTS_ALONE
from flowdp.data_parallel import wrapper
from flowdp.device.streams import StreamLane
from flowdp.graphs.captured_call import CapturedCall
from tests.fakes import FakeCuda, hide_modes
from tests.limits import HANG_S
from tests.loops import assert_equal, gradients, mlp, numbers

Setup = Callable[..., DataParallel]


@pytest.fixture(params=[1, 2, 3])
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def setup(count: int) -> Iterator[Setup]:
    """`flowdp.setup` on a number of devices with unequal shares, closed at the end."""
    made: list[DataParallel] = []

    def setup(model: nn.Module, optimizer: Any = None, **options: Any) -> DataParallel:
        optimizer = optimizer or (lambda parameters: SGD(parameters, 0.1))
        if count > 1:
            options.setdefault("cadence", CadenceOptions(max_anchor=0, speed_hint=(0, 2.0)))
        made.append(flowdp.setup(model, optimizer, **{"devices": ["cpu"] * count, **options}))
        return made[-1]

    yield setup
    for dp in made:
        dp.close()


two = pytest.mark.parametrize("count", [2], indirect=True)


def batch(samples: int = 9, seed: int = 5) -> tuple[Tensor, Tensor]:
    x = numbers(samples, 6, seed=seed)
    return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()


def loss_of(call: Any, samples: int = 9, seed: int = 5) -> Tensor:
    x, y = batch(samples, seed)
    return F.cross_entropy(call(x), y)


def values(module: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


# ---------------------------------------------------------------- arguments and results
@dataclass
class Item:
    ids: Tensor
    name: str


register_dataclass(Item)


class Elaborate(nn.Module):
    """Takes and returns many kinds of pytrees."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(20, 6), mlp()
        self.double()

    def forward(self, fields: Any, item: Item, *, scale: Tensor, power: int, nothing: None = None) -> Any:
        assert item.name == "name"
        assert nothing is None
        out = self.inner(fields["x"] + self.table(item.ids)) * scale**power
        return {"out": out, "pair": (item, [None, "text"]), "mean": out.mean(), "ids": item.ids * 2}


def test_trees_go_in_and_out(setup: Setup) -> None:
    model = Elaborate()
    twin = copy.deepcopy(model)
    dp = setup(model)
    ids = torch.arange(9)
    results = []
    for call in (dp, twin):
        scale = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        found = call({"x": numbers(9, 6), "mask": torch.ones(2)}, Item(ids, "name"), scale=scale, power=2)
        (found["out"].sin().sum() + found["mean"]).backward()
        results.append((found, scale.grad))
    (mine, grad), (other, twin_grad) = results
    assert_equal([mine["out"], mine["mean"], grad], [other["out"], other["mean"], twin_grad])
    assert mine["pair"][0].ids.tolist() == ids.tolist()
    assert mine["pair"][0].name == "name"
    assert mine["pair"][1] == [None, "text"]
    assert mine["ids"].tolist() == (ids * 2).tolist()
    assert_equal(gradients(model), gradients(twin))


@pytest.mark.parametrize("samples", [0, 1, 7])
def test_a_batch_of_any_length(setup: Setup, samples: int) -> None:
    model = mlp()
    dp = setup(model)
    x = numbers(samples, 6)
    out = dp(x)
    assert_equal([out], [model(x)])
    assert len(dp.shard_sizes) == dp.world_size
    assert sum(dp.shard_sizes) == (samples if dp.is_distributed else 0)
    out.sum().backward()


def test_a_call_without_a_batch(setup: Setup) -> None:
    class Prior(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, count: int, factor: Tensor | None = None) -> Tensor:
            return self.weight.sum() * count * (1 if factor is None else factor)

    model = Prior()
    dp = setup(model)
    dp(2).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [2.0] * 3
    assert dp(2, factor=torch.tensor(3.0)).item() == 18.0
    assert sum(dp.shard_sizes) == 0
    dp.step()


# ---------------------------------------------------------------- steps
def loop(call: Any, model: nn.Module, optimizer: Optimizer, steps: int = 6) -> None:
    """Any loop from PyTorch's documentation."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            (loss_of(call, seed=2 * step + part) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        scheduler.step()


def test_clipping_by_hand_is_of_all(setup: Setup) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    dp = setup(model)
    with dp.no_sync():
        loss_of(dp).backward()
    norm = dp.clip_grad_norm_(0.01)
    loss_of(twin).backward()
    assert_equal([norm], [nn.utils.clip_grad_norm_(twin.parameters(), 0.01)])
    assert_equal(gradients(model), gradients(twin))


def test_a_scaler_decides_for_all(setup: Setup) -> None:
    """The last sample, on the last device, gives a gradient that is not finite."""
    model = mlp()
    dp = setup(model, max_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    x, y = batch()
    before = values(model)
    bad = x.clone()
    bad[-1] = float("inf")
    scaler.scale(F.cross_entropy(dp(bad), y)).backward()
    dp.step(scaler)
    assert_equal(values(model), before)
    assert (scaler.get_scale(), dp.training_step) == (2.0, 0)
    scaler.scale(F.cross_entropy(dp(bad), y)).backward()
    scaler.step(dp.optimizers[0])
    scaler.update()
    assert_equal(values(model), before)
    dp.zero_grad()
    scaler.scale(F.cross_entropy(dp(x), y)).backward()
    scaler.step(dp.optimizers[0])
    scaler.update()
    assert dp.training_step == 1
    assert not torch.equal(values(model)[0], before[0])
    assert_equal([dp(x)], [model(x)])


def test_several_optimizers_rates_and_new_ones(setup: Setup) -> None:
    model: Any = mlp()
    twin: Any = copy.deepcopy(model)

    def optimizers(model: Any) -> list[Optimizer]:
        return [SGD(model[0].parameters(), 0.2), AdamW(model[2].parameters(), 0.1)]

    dp, others = setup(model, optimizers(model)), optimizers(twin)
    loss_of(dp).backward()
    dp.set_lr(0.1)
    assert [o.param_groups[0]["lr"] for o in dp.optimizers] == pytest.approx([0.1, 0.05])
    dp.step()
    loss_of(twin).backward()
    for optimizer, lr in zip(others, (0.1, 0.05), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    dp.set_optimizer(lambda parameters: SGD(parameters, 0.3))
    loss_of(dp).backward()
    dp.step()
    loss_of(twin).backward()
    SGD(twin.parameters(), 0.3).step()
    assert_equal(values(model), values(twin))
    assert dp.training_step == 2


def test_the_balancer_learns_from_steps(setup: Setup, count: int) -> None:
    dp = setup(mlp())
    assert dp.throughput == (0.0,) * count
    for _ in range(12):
        loss_of(dp, 30).backward()
        dp.step()
    assert all(rate > 0 for rate in dp.throughput) is (count > 1)
    assert sum(dp.chunk_ratios) == pytest.approx(1.0)
    if count > 1:
        assert dp.chunk_ratios != pytest.approx((1 / 3, 2 / 3), abs=1e-9)


# ---------------------------------------------------------------- shares and buffers


@two
def test_fixed_shares_repeat_a_run_bit_for_bit(setup: Setup) -> None:
    def run(seed: int) -> list[Tensor]:
        model = nn.Sequential(mlp(), nn.Dropout(0.5), nn.Linear(3, 3), nn.RReLU()).double()
        torch.manual_seed(seed)
        dp = setup(model, cadence=None, partition_ratios=(3, 1))
        for step in range(12):
            loss_of(dp, 40, step).backward()
            dp.step()
            assert dp.shard_sizes == (30, 10)
        assert dp.chunk_ratios == (0.75, 0.25)
        return [torch.rand(1), *values(model[0])]

    first, again, other = run(5), run(5), run(6)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"partition_ratios": (1,)}, "1 ratios for 2 devices"),
        ({"partition_ratios": (1, 0)}, "must be positive"),
        ({"partition_ratios": "12"}, "partition_ratios must be numbers"),
        ({"partition_ratios": (1, 1), "cadence": True}, "cadence=True sizes the work by measured speed"),
    ],
)
def test_shares_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        flowdp.setup(mlp(), partial(SGD, lr=0.1), devices=["cpu"] * 2, **options)


@pytest.mark.parametrize("samples", [3, 5])
def test_no_device_gets_a_single_sample_for_batch_norm(setup: Setup, samples: int, count: int) -> None:
    dp = setup(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
    loss_of(dp, samples).backward()
    assert 1 not in dp.shard_sizes
    for window in dp.epoch([batch(samples)]):
        assert 1 not in window.per_rank(count)[0]
        dp.forward_batch(window)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        dp(batch(1)[0])


def test_saved_and_loaded_by_itself_or_as_a_part(setup: Setup) -> None:
    model = mlp()
    dp = setup(model)
    assert list(dp.state_dict()) == list(model.state_dict())
    assert dict(dp.named_parameters()) == dict(model.named_parameters())
    whole = nn.ModuleDict({"net": dp, "head": nn.Linear(3, 2).double()})
    state = {key: value + 1 for key, value in whole.state_dict().items()}
    assert set(state) >= {"net.0.weight", "head.bias"}
    whole.load_state_dict(state)
    assert torch.equal(model.state_dict()["0.weight"], state["net.0.weight"])
    x = numbers(9, 6)
    assert_equal([whole["head"](dp(x))], [whole["head"](model(x))])


# ---------------------------------------------------------------- errors
class Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 0] == 99).any():
            raise KeyError(f"{len(x)} samples")
        out: Tensor = self.inner(x)
        return out


@two
@pytest.mark.parametrize("bad", [(0,), (8,), (0, 8)])
def test_the_models_own_error_names_rank_and_device_and_the_next_call_works(
    setup: Setup, bad: tuple[int, ...]
) -> None:
    model = Picky()
    twin = copy.deepcopy(model)
    dp = setup(model)
    x, y = batch()
    broken = x.clone()
    broken[list(bad), 0] = 99
    with pytest.raises(KeyError, match="samples") as caught:
        dp(broken)
    rank = 0 if 0 in bad else 1
    first, *other, last = caught.value.__notes__
    assert first == f"flowdp: on rank {rank}, cpu"
    assert last == (
        "flowdp: called with 9 samples as 3 + 6, along dim 0 of 'x' of shape (9, 6) of 0: tensor (9, 6)"
    )
    assert len(other) == len(bad) - 1
    for call in (dp, twin):
        F.cross_entropy(call(x), y).backward()
    assert_equal(gradients(model), gradients(twin))
    dp.step()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": mlp}, "a factory is called first"),
    ({"model": SGD(mlp().parameters(), 0.1)}, r"^model and optimizer are swapped: flowdp.setup\(model, opt"),
    ({"optimizer": 3}, "must be a torch optimizer"),
    ({"optimizer": SGD(mlp().parameters(), 0.1)}, "none of the optimizer's parameters is one of the model's"),
    ({"devices": "gpu9"}, "devices"),
    ({"cadence": 3}, "cadence"),
    ({"cadence": CadenceOptions(speed_hint=(5, 2.0))}, "rank 5 of 2"),
    ({"loss_fn": 3}, "loss_fn"),
    ({"inputs": ()}, "inputs"),
    ({"tags": 3}, "tags"),
    ({"buffers": "sum"}, "buffers"),
    ({"max_grad_norm": 0}, "max_grad_norm"),
    ({"tune_process": 3}, "tune_process"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[text[:24] for _, text in WRONG])
def test_what_is_wrong_is_said_before_a_thread_starts(options: dict[str, Any], message: str) -> None:
    before = threading.enumerate()
    given: Any = {
        "model": mlp(),
        "optimizer": lambda parameters: SGD(parameters, 0.1),
        "devices": ["cpu"] * 2,
        **options,
    }
    with pytest.raises(OptionError, match=message):
        flowdp.setup(**given)
    assert threading.enumerate() == before


def pickled(module: nn.Module) -> nn.Module:
    twin: nn.Module = pickle.loads(pickle.dumps(module))
    return twin


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_is_one_of_the_module(setup: Setup, copied: Callable[[nn.Module], nn.Module]) -> None:
    dp = setup(mlp())
    twin, x = copied(dp), numbers(4, 6)
    assert type(twin) is type(dp.module)
    assert twin is not dp.module
    torch.testing.assert_close(twin(x), dp(x))


def test_an_average_of_weights_is_made_behind_setup(setup: Setup) -> None:
    model = mlp()
    dp = setup(model, SGD(model.parameters(), 0.1))
    average = AveragedModel(dp)
    with torch.no_grad():
        model.get_parameter("0.weight").add_(2.0)
    average.update_parameters(dp)  # the first one copies
    x = numbers(4, 6)
    torch.testing.assert_close(average(x), dp(x))


class Named(nn.Module):
    """Has names that a DataParallel has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.loss_fn = nn.CrossEntropyLoss()
        self.epoch = 1

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x) * self.epoch * getattr(self, "step", 1)
        return scores

    def predict(self, x: Tensor) -> Tensor:
        return self(x).argmax(1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = self.loss_fn(self(batch[0]), batch[1])
        return loss

    def report(self) -> str:
        return "mine"


class NamedLikeCalls(Named):
    """Has the names of methods that a DataParallel calls itself, too."""

    def call(self) -> None:
        raise AssertionError("nobody called it")

    close = call


def test_names_of_the_module_come_before_the_wrappers(setup: Setup) -> None:
    model, x = Named(), torch.randn(8, 3)
    twin = copy.deepcopy(model)
    dp = setup(model, SGD(model.parameters(), 0.1))
    assert torch.equal(dp.predict(x), twin.predict(x))
    assert dp.report() == "mine"
    loss = dp.training_step((x, torch.ones(8, dtype=torch.long)))
    assert torch.equal(loss, dp.loss_fn(model(x), torch.ones(8, dtype=torch.long)))
    for one in (dp, twin):
        one.epoch += 2
        one.step = 3  # only the wrapper has the name
    torch.testing.assert_close(dp(x), twin(x))
    assert isinstance(dp, flowdp.DataParallel)
    torch.testing.assert_close(flowdp.DataParallel.predict(dp, x), model(x).detach())


def test_a_module_with_the_wrappers_names_works_in_windows(count: int) -> None:
    model = NamedLikeCalls()
    with flowdp.setup(
        model,
        SGD(model.parameters(), 0.1),
        devices=["cpu"] * count,
        cadence=False,
        loss_fn=lambda c: c.output.pow(2).mean(),
        timeline=True,
    ) as dp:
        (window,) = flowdp.DataParallel.epoch(dp, [torch.randn(8, 3)])
        dp.forward_batch(window)
        assert model.get_parameter("layer.weight").grad is not None
        assert str(flowdp.DataParallel.report(dp))


def test_a_cell_that_is_run_twice_is_told_how_to_begin_anew(setup: Setup) -> None:
    made = setup(mlp())
    with pytest.raises(
        OptionError,
        match=r"set up already, .*: give its .module, as in flowdp.setup\(model.module, optimizer\)",
    ):
        setup(made)
    loss_of(setup(made.module)).backward()  # as the message says


@two
def test_batch_norm_is_told_of_once(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    dp = setup(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double())
    for _ in range(2):
        loss_of(dp).backward()
    assert caplog.messages.count(PARTS_ALONE) == 1


# ---------------------------------------------------------------- life cycle
def test_it_closes_twice_and_the_model_goes_on(setup: Setup, count: int) -> None:
    model = mlp()
    dp = setup(model)
    with dp:
        loss_of(dp).backward()
    dp.close()
    dp.optimizers[0].step()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("flowdp")]
    if count > 1:
        with pytest.raises(RuntimeError, match="closed"):
            dp(numbers(4, 6))
    loss_of(model).backward()


def test_collecting_it_ends_its_threads(count: int) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)
    dp = flowdp.setup(model, optimizer, devices=["cpu"] * count)
    loss_of(dp).backward()
    dp.step()
    assert dp.is_distributed == (count > 1)
    replicas = [weakref.ref(replica) for replica in dp.replicas]
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("flowdp")]
    assert len(threads) == (count if count > 1 else 0)
    gone = weakref.ref(dp)
    del dp
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert not any(replica() for replica in replicas), "the optimizer keeps the replicas"
    loss_of(model).backward()
    optimizer.step()


@two
def test_the_process_is_as_before(setup: Setup) -> None:
    before = sys.getswitchinterval()
    dp = setup(mlp())
    assert sys.getswitchinterval() < before
    dp.close()
    assert sys.getswitchinterval() == before
    setup(mlp(), tune_process=False)
    assert sys.getswitchinterval() == before


@pytest.mark.posix
@two
def test_after_a_ctrl_c_the_next_call_works(setup: Setup) -> None:
    release = threading.Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.is_slow = True

        def forward(self, x: Tensor) -> Tensor:
            if slow and len(x) == 6:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                assert release.wait(HANG_S)
            out: Tensor = self.inner(x)
            return out

    slow = [True]
    model = Slow()
    twin = copy.deepcopy(model)
    dp = setup(model)
    with pytest.raises(KeyboardInterrupt):
        dp(numbers(9, 6))
    slow.clear()
    timer = threading.Timer(0.1, release.set)
    timer.start()
    for call in (dp, twin):
        loss_of(call).backward()
    assert_equal(gradients(model), gradients(twin))
    timer.join()


# ---------------------------------------------------------------- windows
def cross_entropy(context: flowdp.LossContext) -> Tensor:
    return F.cross_entropy(context.output, context.batch[1])


CADENCES = {"windows": CadenceOptions(anchor=2, speed_hint=(0, 2.0)), "cut": False}


def test_windows_beside_calls_and_no_sync(setup: Setup) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    dp = setup(model, cadence=CADENCES["windows"], loss_fn=cross_entropy)
    for window in dp.epoch([batch(3, seed) for seed in range(9)]):
        with dp.no_sync():
            dp.forward_batch(window)
        loss_of(dp).backward()
        for call in (window, batch()):
            F.cross_entropy(twin(call[0]), call[1]).backward()
    assert_equal(gradients(model), gradients(twin))
    dp.step()
    with torch.no_grad():
        assert_equal([dp(batch()[0])], [model(batch()[0])])


def test_a_scaler_over_windows(setup: Setup) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    other = SGD(twin.parameters(), 0.1)
    dp = setup(model, cadence=CADENCES["windows"], loss_fn=cross_entropy)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for window in dp.epoch([batch(3, seed) for seed in range(9)]):
        result = dp.forward_batch(window, scaler)
        loss = F.cross_entropy(twin(window[0]), window[1])
        assert result.loss is not None
        assert_equal([result.loss], [loss.detach()])
        dp.step(scaler)
        loss.backward()
        other.step()
        other.zero_grad()
    assert_equal(values(model), values(twin))


def test_a_loss_function_comes_and_goes(setup: Setup) -> None:
    dp = setup(mlp())
    assert dp.loss_fn is None
    with pytest.raises(OptionError, match="loss_fn"):
        dp.set_loss_fn(3)  # type: ignore[arg-type]
    dp.set_loss_fn(cross_entropy)
    assert dp.loss_fn is cross_entropy
    for window in dp.epoch([batch(4)]):
        assert dp.forward_batch(window).loss is not None
        dp.step()
    dp.set_loss_fn(None)
    for window in dp.epoch([batch(4)]):
        assert dp.forward_batch(window).loss is None


def test_epochs_are_told_to_the_sampler(setup: Setup) -> None:
    data: Dataset[Any] = TensorDataset(*batch(8))
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0)
    dp = setup(mlp())
    loader = DataLoader(data, 4, sampler=sampler)
    told = []
    for epoch in (None, None, 7, None):
        for _ in dp.epoch(loader, epoch):
            pass
        told.append(sampler.epoch)
    assert told == [0, 1, 7, 8]


# ---------------------------------------------------------------- captured calls
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]], ids=["alone", "first of two"])
def test_one_device_captures_its_calls_and_says_so(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = FakeCuda()
    monkeypatch.setattr(
        wrapper, "captured_call", lambda module, lanes, *_, **__: CapturedCall(module, lanes[0])
    )
    monkeypatch.setattr(wrapper, "open_lanes", lambda devices: [StreamLane(d, card) for d in devices])
    hide_modes(monkeypatch.setattr)
    model = mlp()
    twin = copy.deepcopy(model)

    def train(call: Any, optimizer: Optimizer) -> None:
        for seed in range(12):
            loss_of(call, seed=seed).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(twin, SGD(twin.parameters(), 0.1))
    optimizer = SGD(model.parameters(), 0.1)
    with card.stream(card.Stream()), flowdp.setup(model, optimizer, devices=devices) as dp:
        if dp.is_distributed:
            dp(batch()[0])
            assert card.captures.replays == 0
            dp._balancer.pace.is_settled = True  # the first device is faster without the other
        train(dp, optimizer)
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        assert card.captures.replays > 12
        assert "on cpu" in repr(dp)
        assert repr(dp).endswith("; calls are captured>")
        before, (x, _) = card.captures.replays, batch()
        dp.call(lambda module, x: module(x), x)
        dp.module(x)
        with torch.no_grad():
            dp(x)
        dp.eval()(x)
        dp.train().close()
        dp(x)
        assert card.captures.replays == before
        assert "captured" not in repr(dp)
