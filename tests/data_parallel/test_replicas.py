"""Tests of replicas: like the user's module before each call, and what their jobs come after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

from flowdp.data_parallel.replicas import Replicas
from flowdp.device.streams import StreamLane
from tests.fakes import FakeCuda
from tests.loops import CPU, mlp, numbers, replicas_of


def is_like(replicas: Replicas, rank: int = 1) -> bool:
    mine, other = replicas.module.state_dict(), replicas.modules[rank].state_dict()
    return all(torch.equal(mine[key], other[key]) for key in mine)


def cards(count: int = 2) -> list[StreamLane]:
    """Ranks without shared memory, though it is the CPU's."""
    cuda = FakeCuda()
    return [StreamLane(CPU, cuda) for _ in range(count)]


Lanes = Callable[[], Any]


@pytest.fixture(params=[cards, lambda: None], ids=["cards", "host"])
def lanes(request: pytest.FixtureRequest) -> Lanes:
    made: Lanes = request.param
    return made


# ---------------------------------------------------------------- tensors


WRITES: dict[str, Callable[[Any], object]] = {
    "counted": lambda m: nn.init.ones_(m[0].bias),
    "uncounted": lambda m: m[0].weight.data.add_(1.0),
    "a buffer": lambda m: m[1].running_mean.add_(1.0),
    "a buffer, uncounted": lambda m: m[1].running_mean.data.add_(1.0),
    "a buffer that grows": lambda m: setattr(m[1], "running_mean", torch.ones(5)),
    "a buffer made by expand": lambda m: setattr(m[1], "running_mean", torch.ones(1).expand(2)),
    "an integer": lambda m: m[1].num_batches_tracked.add_(1),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "another dtype": lambda m: m.double(),
    "a part": lambda m: m.append(nn.Linear(2, 1)),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_the_loop_writes_is_there_in_the_next_call(lanes: Lanes, write: str) -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with replicas_of(module, lanes=lanes()) as replicas:
        for _ in range(3):  # there is no call from which on it is not looked for
            assert is_like(replicas)
            WRITES[write](module)
            replicas.look()
            replicas.follow()
        assert is_like(replicas)


# ---------------------------------------------------------------- buffers averaged
@pytest.mark.parametrize("samples", [(1, 3, 0), (2, 0, 2)])
def test_the_mean_of_buffers_is_weighted_by_samples(lanes: Lanes, samples: tuple[int, ...]) -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("flag", torch.tensor(False))
            self.register_buffer("grown", torch.zeros(1))
            self.register_buffer("same", torch.ones(1))
            self.register_buffer("none", None)

    module: Any = Buffers()
    own = lanes()
    with replicas_of(module, 3, lanes=None if own is None else cards(3)) as replicas:
        for rank, net in enumerate(replicas.modules):
            replica: Any = net
            replica.mean.fill_(rank + 1)
            replica.phase.fill_(1j * rank)
            replica.count.fill_(rank)
            replica.flag.fill_(rank == 2)
            replica.grown = torch.full((1 + (rank > 0),), 5.0)
        version = module.same._version
        replicas.average_buffers(samples)
    ranks = [rank for rank, count in enumerate(samples) for _ in range(count)]
    assert module.mean.tolist() == [1 + sum(ranks) / 4] * 2
    assert module.phase.item() == pytest.approx(1j * sum(ranks) / 4)
    assert module.count == max(ranks)
    assert bool(module.flag) is (2 in ranks)
    assert module.grown.tolist() == [5.0]
    assert module.same._version == version


def test_a_mean_is_not_counted_as_a_write_to_what_a_graph_has_saved() -> None:
    module: Any = nn.BatchNorm1d(2)
    with replicas_of(module) as replicas:
        out = torch.ones(2, requires_grad=True) * module.running_mean
        replica: Any = replicas.modules[1]
        replica.running_mean.fill_(3)
        replicas.average_buffers((1, 1))
        assert module.running_mean.tolist() == [1.5] * 2
        out.sum().backward()


# ---------------------------------------------------------------- hooks
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_hook_is_named_unless_it_is_torchs_own() -> None:
    module: Any = nn.Sequential(weight_norm(nn.Linear(2, 2)), nn.Tanh())

    def note(*_: Any) -> None: ...

    with replicas_of(module) as replicas:
        assert replicas.hook() is None
        handle = module[1].register_full_backward_hook(note)
        assert str(replicas.hook()).endswith("note of Tanh")
        handle.remove()
        assert replicas.hook() is None


# ---------------------------------------------------------------- jobs


def test_on_cards_the_first_rank_works_in_the_callers_thread() -> None:
    with replicas_of(mlp(), lanes=cards()) as replicas:
        here, there = replicas.each([threading.current_thread] * 2)
        assert here is threading.current_thread()
        assert there is not None
        assert there.name == "flowdp-replica-1"


# ---------------------------------------------------------------- streams


class TwoCards(FakeCuda):
    """Each thread has one current stream per device."""

    def current_stream(self, device: Any = None) -> Any:
        stack: list[Any] = getattr(self._local, "stack", [])
        own = [stream for stream in stack if device in (None, stream.device)]
        return own[-1] if own else self.default


@pytest.mark.parametrize("is_first", [True, False], ids=["rank first", "caller first"])
def test_the_order_holds_on_the_callers_stream_of_the_other_device_too(is_first: bool) -> None:
    cuda = TwoCards()
    near = torch.device("cpu", 0)  # another name than that of the tensors
    lanes = [StreamLane(device, cuda) for device in (near, CPU)]
    with replicas_of(mlp(), lanes=lanes) as replicas:
        there: Any = replicas.modules[1]
        bias = there[0].bias.detach()
        cuda.watch("replica", bias)
        with cuda.stream(cuda.Stream(near)), cuda.stream(cuda.Stream(CPU)):
            if not is_first:
                bias.add_(1.0)
            replicas.each([None, lambda: bias.mul_(2.0)])
            if is_first:
                bias.add_(1.0)
    assert not cuda.races


def test_ranks_of_one_card_tell_the_allocator_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    monkeypatch.setattr(
        "flowdp.data_parallel.replicas.keep_for",
        lambda stream, tensors: held.append((list(tensors), stream)),
    )
    cuda = FakeCuda()
    x = numbers(2)
    for first in (CPU, torch.device("cpu", 0)):  # another card, by its name
        lanes = [StreamLane(first, cuda), StreamLane(CPU, cuda)]
        with replicas_of(mlp(), lanes=lanes) as replicas:
            for rank in range(2):
                replicas.call(rank, 1, lambda _module, given: given, {"x": [x]})
        assert held == ([([x], lanes[1].compute)] if first == CPU else [])
        held.clear()


def test_after_an_error_the_caller_comes_after_the_ranks_all_the_same() -> None:
    cuda = FakeCuda()
    module: Any = mlp()
    with (
        cuda.stream(cuda.Stream()),
        replicas_of(module, lanes=[StreamLane(CPU, cuda) for _ in range(2)]) as replicas,
    ):
        cuda.watch("module", *module.parameters())

        def job() -> None:
            module(numbers(2, 6))
            raise KeyError

        with torch.no_grad():
            module[0].bias.add_(1.0)
            with pytest.raises(KeyError):
                replicas.each([None, job])
            module[0].bias.add_(1.0)
    assert not cuda.races
