"""Tests of replicas: equal to the user's module before they compute, after writes of any kind."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from flowdp.data_parallel import unseen_writes
from flowdp.data_parallel.replicas import Replicas
from flowdp.device.streams import HostLane, StreamLane
from flowdp.errors import FlowdpError, OptionError
from tests.fakes import FakeCuda
from tests.loops import CPU, WAIT_S, assert_equal, gradients, mlp, numbers, replicas_of


def bring(replicas: Replicas, *ranks: int) -> None:
    """The first part of a call."""
    replicas.follow()
    wanted = ranks or range(len(replicas.modules))
    replicas.each(
        [partial(replicas.receive, rank) if rank in wanted else None for rank in range(len(replicas.modules))]
    )
    replicas.note()


def is_like(replicas: Replicas, rank: int = 1) -> bool:
    mine, other = replicas.modules[0].state_dict(), replicas.modules[rank].state_dict()
    return all(torch.equal(mine[key], other[key]) for key in mine)


def cards(count: int = 2) -> list[StreamLane]:
    """Ranks without shared memory, though it is the CPU's."""
    cuda = FakeCuda()
    return [StreamLane(CPU, cuda) for _ in range(count)]


class Copied:
    """Counts the tensors sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: list[int] = []
        real = torch._foreach_copy_
        monkeypatch.setattr(
            torch, "_foreach_copy_", lambda to, of: [self.counts.append(len(to)), real(to, of)]
        )

    def take(self) -> list[int]:
        taken, self.counts = self.counts, []
        return taken


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Copied:
    return Copied(monkeypatch)


# ---------------------------------------------------------------- tensors sent
def test_replicas_from_a_factory_take_the_users_values() -> None:
    torch.manual_seed(9)
    with replicas_of(
        mlp(), 3, factory=lambda device: nn.Sequential(*map(type_of, mlp())).double()
    ) as replicas:
        assert not is_like(replicas)
        bring(replicas)
        assert is_like(replicas, 1)
        assert is_like(replicas, 2)


def type_of(layer: nn.Module) -> nn.Module:
    return nn.Linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else nn.Tanh()


WRITES: dict[str, tuple[Callable[[nn.Module], object], int]] = {
    "optimizer": (lambda m: sgd_step(m), 4),
    "one tensor": (lambda m: nn.init.ones_(m[0].bias), 1),  # type: ignore[index]
    "load_state_dict": (lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}), 4),
    "a new parameter": (lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(8).double())), 1),  # type: ignore[index]
    "nothing": (lambda m: None, 0),
}


def sgd_step(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), 0.1).step()


@pytest.mark.parametrize("write", WRITES)
def test_what_has_changed_is_sent_and_nothing_else(write: str, copied: Copied) -> None:
    module = mlp()
    change, tensors = WRITES[write]
    with replicas_of(module, lanes=cards()) as replicas:
        bring(replicas)
        assert copied.take() == [4]
        bring(replicas)
        assert copied.take() == []
        change(module)
        assert is_like(replicas) == (tensors == 0)
        bring(replicas)
        assert is_like(replicas)
        assert copied.take() == [tensors] * bool(tensors)


def test_a_rank_that_had_no_part_is_sent_all_that_it_has_missed() -> None:
    module = mlp()
    with replicas_of(module, 3, lanes=cards(3)) as replicas:
        bring(replicas)
        for _ in range(2):
            sgd_step(module)
            bring(replicas, 0, 1)
        assert is_like(replicas, 1)
        assert not is_like(replicas, 2)
        bring(replicas)
        assert is_like(replicas, 2)


@pytest.mark.parametrize("lanes", [cards, lambda: None], ids=["cards", "host"])
def test_a_write_that_torch_does_not_count_reaches_the_next_call(lanes: Callable[[], Any]) -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with replicas_of(module, lanes=lanes()) as replicas:
        for _ in range(12):
            bring(replicas)
            assert is_like(replicas)
            module[0].weight.data.add_(1.0)
            module[1].running_mean.data.add_(1.0)


def test_a_late_write_that_torch_does_not_count_is_refused_but_for_what_tells_of_it() -> None:
    module: Any = mlp()
    with replicas_of(module, lanes=cards()) as replicas:
        for _ in range(unseen_writes.FIRST + 3):
            bring(replicas)
        for notice in (replicas.forget, module.eval, module.train):
            module[0].weight.data.add_(1.0)
            notice()
            for _ in range(3):
                bring(replicas)
            assert is_like(replicas)
        module[0].weight.data.add_(1.0)
        bring(replicas)  # asks
        with pytest.raises(FlowdpError, match="sync_params"):
            bring(replicas)
        bring(replicas)


class Moving(nn.Module):
    """Its buffer is a new object after every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("state", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.state + 1
        return self.weight * x + self.state


def test_a_buffer_that_moves_to_a_new_object() -> None:
    module = Moving()
    with replicas_of(module) as replicas:
        for turn in range(3):
            bring(replicas)
            assert replicas.modules[1].state.tolist() == [turn, turn]
            for replica in replicas.modules:
                replica(torch.ones(2))
        assert [b.tolist() for b in replicas.buffers(0)] == [[3.0, 3.0]]


def test_a_buffer_that_an_inference_made() -> None:
    module = Moving()
    with replicas_of(module) as replicas:
        bring(replicas)
        with torch.inference_mode():
            for replica in replicas.modules:
                replica(torch.ones(2))
        assert module.state.is_inference()
        for _ in range(2):  # it has no version, so it is sent every time
            replicas.modules[1].state = replicas.modules[1].state + 7
            bring(replicas)
            assert is_like(replicas)
        with torch.inference_mode():
            replicas.modules[1].state = replicas.modules[1].state + 7
            bring(replicas)
        assert is_like(replicas)


def test_modes_and_flags_are_followed_part_by_part() -> None:
    module = mlp()
    with replicas_of(module) as replicas:
        module.eval()
        module[2].train()
        module[0].weight.requires_grad_(False)  # type: ignore[operator]
        bring(replicas)
        replica = replicas.modules[1]
        assert [part.training for part in replica.modules()] == [False, False, False, True]
        assert [p.requires_grad for p in replica.parameters()] == [False, True, True, True]
        assert len(replicas.trained(0)) == len(replicas.trained(1)) == 3
        module[0].weight.requires_grad_(True)  # type: ignore[operator]
        bring(replicas)
        assert all(p.requires_grad for p in replica.parameters())


def test_a_replica_gets_the_buffers_as_they_were_before_the_first_rank_wrote_to_them() -> None:
    module = nn.BatchNorm1d(2)
    written = threading.Event()

    def write() -> None:
        module.running_mean.fill_(7)  # type: ignore[union-attr]
        module.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
        written.set()

    def read() -> None:
        assert written.wait(WAIT_S)
        replicas.receive(1)

    with replicas_of(module) as replicas:
        for value in (3, 4):
            module.running_mean.fill_(value)  # type: ignore[union-attr]
            replicas.follow()
            replicas.each([write, read])
            assert replicas.modules[1].running_mean.tolist() == [value] * 2  # type: ignore[union-attr, operator]
        assert replicas.modules[1].num_batches_tracked.item() == 7  # type: ignore[union-attr, operator]


def test_own_buffers_are_kept_by_those_that_had_a_part() -> None:
    module = nn.BatchNorm1d(2)
    with replicas_of(module, 3) as replicas:
        bring(replicas)
        for rank, replica in enumerate(replicas.modules):
            replica.running_mean.fill_(rank)  # type: ignore[union-attr, operator]
        replicas.keep_buffers((5, 5, 0))
        bring(replicas)
        assert [replica.running_mean[0].item() for replica in replicas.modules] == [0, 1, 0]  # type: ignore[union-attr, index]
        module.running_mean.fill_(8)  # type: ignore[union-attr]
        bring(replicas)
        assert [replica.running_mean[0].item() for replica in replicas.modules] == [8, 8, 8]  # type: ignore[union-attr, index]


def test_kept_buffers_do_not_hide_parameters() -> None:
    module = nn.BatchNorm1d(2)
    with replicas_of(module) as replicas:
        bring(replicas)
        replicas.keep_buffers((1, 1))
        nn.init.constant_(module.weight, 3)
        bring(replicas)
        assert is_like(replicas)
    bare = mlp()
    with replicas_of(bare) as replicas:
        bring(replicas)
        replicas.keep_buffers((1, 1))
        sgd_step(bare)
        bring(replicas)
        assert is_like(replicas)


# ---------------------------------------------------------------- leftover gradients
def leave(replicas: Replicas, *ranks: int) -> None:
    for rank in ranks:
        for tensor in replicas.trained(rank):
            tensor.grad = torch.ones_like(tensor)


def test_gradients_are_dropped_once_the_user_has_zeroed_his_own() -> None:
    module = mlp()
    with replicas_of(module) as replicas:
        with replicas.backward(keeps=True):
            leave(replicas, 0, 1)
        with replicas.backward(keeps=False):
            assert replicas.has_unsummed(1)
            assert not replicas.has_unsummed(0)
        module.zero_grad()
        with replicas.backward(keeps=False):
            assert not replicas.has_unsummed(1)


def test_gradients_stay_where_the_users_module_never_had_any() -> None:
    with replicas_of(mlp()) as replicas:
        with replicas.backward(keeps=False):
            leave(replicas, 1)
        with replicas.backward(keeps=False):
            assert replicas.has_unsummed(1)


def test_gradients_of_what_failed_are_dropped() -> None:
    with replicas_of(mlp()) as replicas:
        leave(replicas, 0, 1)
        with pytest.raises(KeyError), replicas.backward(keeps=False):
            raise KeyError
        with replicas.backward(keeps=False):
            assert not replicas.has_unsummed(1)


# ---------------------------------------------------------------- jobs
def test_jobs_run_at_once_each_in_its_thread() -> None:
    met = threading.Barrier(3)

    def job() -> str:
        met.wait(WAIT_S)
        return threading.current_thread().name

    with replicas_of(mlp(), 3) as replicas:
        assert replicas.each([job] * 3) == ["flowdp-replica-0", "flowdp-replica-1", "flowdp-replica-2"]
        assert replicas.each([None, threading.get_ident, None])[0] is None


def test_jobs_run_in_the_callers_modes_or_in_those_given() -> None:
    with replicas_of(mlp()) as replicas:
        with torch.no_grad():
            modes = replicas.modes()
            assert replicas.each([torch.is_grad_enabled] * 2) == [False, False]
        assert replicas.each([torch.is_grad_enabled] * 2) == [True, True]
        assert replicas.each([torch.is_grad_enabled] * 2, modes) == [False, False]


def test_an_error_names_rank_and_device() -> None:
    def fail() -> None:
        raise KeyError("mine")

    with replicas_of(mlp()) as replicas:
        for rank in range(2):
            with pytest.raises(KeyError, match="mine") as caught:
                replicas.each([fail if r == rank else None for r in range(2)])
            assert caught.value.__notes__ == [f"flowdp: on rank {rank}, cpu"]
        with pytest.raises(KeyError) as caught:
            replicas.each([fail, fail])
        assert caught.value.__notes__ == [
            "flowdp: on rank 0, cpu",
            "at the same time: the same; flowdp: on rank 1, cpu",
        ]


def test_work_is_timed_for_each_rank() -> None:
    with replicas_of(mlp()) as replicas:
        replicas.each([None, lambda: torch.ones(3)])
        for watch in replicas.watches:
            watch.lap()
        assert replicas.watches[0].take_ms() == 0.0
        assert replicas.watches[1].take_ms() > 0.0


# ---------------------------------------------------------------- modules that cannot be replicated
def other_net(change: str) -> nn.Module:
    net = mlp()
    if change == "shape":
        net[2] = nn.Linear(8, 4).double()
    elif change == "dtype":
        net[2] = nn.Linear(8, 3)
    elif change == "missing":
        net[2] = nn.Linear(8, 3, bias=False).double()
    elif change == "more":
        net.append(nn.Linear(3, 3))
    return net


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "shape",
            r"'2\.weight' is float64 \(4, 8\) in the replica for .* and float64 \(3, 8\) in the model",
        ),
        ("dtype", r"'2\.weight' is float32"),
        ("missing", r"'2\.bias' is missing in the replica"),
        ("more", r"'3\.weight' is .* in the replica for .* and missing in the model"),
    ],
)
def test_a_replica_that_differs_is_refused_by_name(change: str, message: str) -> None:
    with (
        pytest.raises(OptionError, match=message),
        replicas_of(mlp(), factory=lambda device: other_net(change)),
    ):
        pass


def test_a_replica_in_another_order_is_refused() -> None:
    def pair(*names: str) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(1, 1) for name in names})

    with (
        pytest.raises(OptionError, match="in another order"),
        replicas_of(pair("a", "b"), factory=lambda device: pair("b", "a")),
    ):
        pass


def test_a_factory_makes_new_modules() -> None:
    module = mlp()
    for made in (module, None):
        factory: Any = lambda device, made=made: made  # noqa: E731
        with (
            pytest.raises(OptionError, match="must build a new module"),
            replicas_of(module, factory=factory),
        ):
            pass


def test_a_model_that_cannot_be_copied_asks_for_a_factory() -> None:
    module = mlp()
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(OptionError, match="give a factory: replica="), replicas_of(module):
        pass
    with replicas_of(module, factory=lambda device: mlp()) as replicas:
        assert len(replicas.modules) == 2


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", [partial(prune.random_unstructured, amount=0.5), weight_norm, spectral_norm])
def test_pruned_and_normed_layers_are_copied_before_and_after_a_forward(kind: Callable[..., Any]) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(kind(nn.Linear(6, 4), "weight")).double().eval()
    module(numbers(2, 6))
    with replicas_of(module) as replicas:
        sgd_step(module)
        bring(replicas)
        x = numbers(4, 6)
        assert torch.equal(replicas.modules[1](x), module(x))
        replicas.modules[1](x).sum().backward()
        module.zero_grad()
        module(x).sum().backward()
        assert_equal(gradients(replicas.modules[1]), gradients(module))


def test_a_result_with_a_graph_in_an_attribute_is_named() -> None:
    module = mlp()
    module[0].found = {"one": [module(numbers(2, 6))]}  # type: ignore[assignment]
    with (
        pytest.raises(OptionError, match=r"attribute '0\.found' holds a tensor with a graph: detach it"),
        replicas_of(module),
    ):
        pass


def test_factories_draw_nothing_of_the_caller() -> None:
    def factory(device: torch.device) -> nn.Module:
        random.random()
        np.random.rand()
        return mlp()

    module = mlp()

    def draw() -> list[float]:
        return [torch.rand(1).item(), random.random(), np.random.rand()]

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    wanted = draw()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    with replicas_of(module, factory=factory):
        assert draw() == wanted


def test_copies_begin_without_gradients_and_tied_parameters_stay_tied() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    sgd_step(module)
    with replicas_of(module) as replicas:
        replica: Any = replicas.modules[1]
        assert all(p.grad is None for p in replica.parameters())
        assert replica[0].weight is replica[1].weight
        assert len(replicas.trained(0)) == len(replicas.trained(1)) == 3


# ---------------------------------------------------------------- streams
@pytest.mark.parametrize("missing", ["none", "the ranks' for the caller", "the caller's for the ranks"])
def test_ranks_come_after_the_caller_and_he_after_them(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    lanes = [StreamLane(CPU, cuda) for _ in range(2)]
    module = mlp()
    user = cuda.Stream()
    real = type(user).wait_event

    def wait(stream: Any, event: Any) -> None:
        is_user = stream is user
        if missing == "none" or is_user is not (missing == "the caller's for the ranks"):
            real(stream, event)

    with cuda.stream(user), replicas_of(module, lanes=lanes) as replicas:
        bring(replicas)
        cuda.watch("replica", *replicas.modules[1].parameters())
        cuda.watch("module", *module.parameters())
        out = torch.zeros(5, 3, dtype=torch.float64)
        cuda.watch("output", out)
        monkeypatch.setattr(type(user), "wait_event", wait)

        def job() -> None:
            replicas.receive(1)
            out.copy_(replicas.modules[1](numbers(5, 6)))

        with torch.no_grad():
            module[0].bias.add_(1.0)  # type: ignore[operator]
            replicas.follow()
            replicas.each([None, job])
            module[0].bias.add_(1.0)  # type: ignore[operator]
            assert_equal([out + 0], [replicas.modules[1](numbers(5, 6))])
    races = " ".join(cuda.races)
    assert bool(races) == (missing != "none"), races
    if missing == "the ranks' for the caller":
        assert "module" in races
    if missing == "the caller's for the ranks":
        assert "output" in races
        assert "module" in races, "the next write may overtake the copy to the replica"


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
        bring(replicas)
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


@pytest.mark.parametrize("first", ["card", "host"])
def test_a_card_and_the_cpu_together(first: str) -> None:
    card = StreamLane(CPU, FakeCuda())
    lanes = [card, HostLane(CPU)] if first == "card" else [HostLane(CPU), card]
    module = mlp()
    with replicas_of(module, lanes=lanes) as replicas:
        sgd_step(module)
        bring(replicas)
        assert is_like(replicas)


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
                replicas.hold(rank, {"x": [x]})
        assert held == ([([x], lanes[1].compute)] if first == CPU else [])
        held.clear()


@pytest.mark.posix
def test_what_an_interrupt_left_running_ends_before_the_module_is_looked_at() -> None:
    """Otherwise it would count as sent although it was not."""
    module = mlp()
    release = threading.Event()
    with replicas_of(module) as replicas:

        def slow() -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert release.wait(WAIT_S)
            replicas.receive(1)

        replicas.follow()
        with pytest.raises(KeyboardInterrupt):
            replicas.each([None, slow])
        sgd_step(module)
        timer = threading.Timer(0.1, release.set)
        timer.start()
        replicas.follow()
        assert release.is_set()
        replicas.each([None, partial(replicas.receive, 1)])
        assert is_like(replicas)
        timer.join()


def test_a_model_that_was_rebuilt_is_refused() -> None:
    module = mlp()
    with replicas_of(module) as replicas:
        bring(replicas)
        module[2] = nn.Linear(8, 3).double()
        with pytest.raises(FlowdpError, match="the parts of Sequential"):
            replicas.follow()


def test_a_converted_parameter_is_refused_and_a_buffer_that_grows_is_followed() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("cache", torch.zeros(1))

    module = Growing()
    with replicas_of(module) as replicas:
        bring(replicas)
        module.cache = torch.arange(5)
        bring(replicas)
        assert is_like(replicas)
        module.inner.half()
        with pytest.raises(FlowdpError, match=r"'inner.0.weight' is float16 \(8, 6\) now"):
            bring(replicas)


def test_after_an_error_the_caller_comes_after_the_ranks_all_the_same() -> None:
    cuda = FakeCuda()
    module = mlp()
    with (
        cuda.stream(cuda.Stream()),
        replicas_of(module, lanes=[StreamLane(CPU, cuda) for _ in range(2)]) as replicas,
    ):
        bring(replicas)
        cuda.watch("replica", *replicas.modules[1].parameters())
        cuda.watch("module", *module.parameters())

        def job() -> None:
            replicas.receive(1)
            raise KeyError

        with torch.no_grad():
            module[0].bias.add_(1.0)  # type: ignore[operator]
            replicas.follow()
            with pytest.raises(KeyError):
                replicas.each([None, job])
            module[0].bias.add_(1.0)  # type: ignore[operator]
    assert not cuda.races


def test_a_job_at_home_is_done_where_rank_0_works_and_is_not_timed() -> None:
    with replicas_of(mlp()) as replicas, torch.no_grad():
        (worker, _) = replicas.each([threading.current_thread, None])
        for watch in replicas.watches:
            watch.discard()
        done = replicas.on_first_rank(lambda: (threading.current_thread(), torch.is_grad_enabled()))
        assert done == (worker, False)
        replicas.watches[0].lap()
        assert replicas.watches[0].take_ms() == 0.0
        with pytest.raises(ValueError, match="no"):
            replicas.on_first_rank(lambda: int("no"))
