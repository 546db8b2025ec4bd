"""Tests of parameters on other devices, and of gradients on their way back, over NCCL and by copies."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective.nccl_loop import row_sizes
from flowdp.data_parallel.gradient_sum import accumulate, add_up, has_hooks, without_hooks
from flowdp.data_parallel.replicas import Replicas, device_copies
from flowdp.device.streams import HostLane, Lane, StreamLane
from tests.fakes import FakeCuda
from tests.loops import CPU, assert_equal, called, gradients, mlp, numbers, replicas_of
from tests.wired import fake_link, wired

ROW = 48 + 8 + 24 + 8


@contextmanager
def carried(module: nn.Module, count: int = 2) -> Iterator[Replicas]:
    """Replicas on fake streams without NCCL; at the end every access must have been ordered."""
    cuda = FakeCuda()
    lanes = [StreamLane(CPU, cuda) for _ in range(count)]
    with cuda.stream(cuda.default), replicas_of(module, lanes=lanes) as replicas:
        for rank, replica in enumerate(replicas.modules):
            cuda.watch(f"rank {rank}", *replica.parameters())
        yield replicas
    assert not cuda.races


Way = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(params=[wired, carried], ids=["nccl", "copies"])
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


def outputs(replicas: Replicas, x: Tensor, sizes: tuple[int, ...] = (2, 2)) -> Tensor:
    out: Tensor = called(replicas, sizes, x)
    return out


def call(replicas: Replicas, x: Tensor, sizes: tuple[int, ...] = (2, 2)) -> Tensor:
    return outputs(replicas, x, sizes).sin().mean()


def taken(replicas: Any) -> list[tuple[str, list[int]]]:
    """The groups of NCCL since the last call: kind, and counts (bytes in a broadcast)."""
    nccl = replicas.nccl
    found = [(kind, counts) for kind, (_, counts) in zip(nccl.kinds, nccl.groups, strict=True)]
    nccl.kinds.clear()
    nccl.groups.clear()
    return found


def copies_of(replicas: Replicas, rank: int = 1) -> list[Tensor]:
    """The parameters of a rank in the last call."""
    return list(replicas.modules[rank].parameters())


# ---------------------------------------------------------------- parameters


WRITES: dict[str, Callable[[Any], object]] = {
    "optimizer": lambda m: torch.optim.SGD(m.parameters(), 1.0).step(),
    "uncounted": lambda m: m[0].weight.data.add_(1.0),
    "through memory": lambda m: m[0].weight.detach().numpy().__iadd__(1.0),
    "in inference": lambda m: m[0].weight.mul_(2.0),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "moved": lambda m: setattr(m[0].weight, "data", m[0].weight.data + 1),
    "a new parameter": lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(8).double())),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "another shape": lambda m: m.__setitem__(2, nn.Linear(8, 5).double()),
    "another dtype": lambda m: m[2].float() and m.insert(2, Cast()),
    "one more": lambda m: m.append(nn.Linear(3, 3).double()),
    "one in front": lambda m: m.insert(0, nn.Linear(6, 6).double()),
}


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


@pytest.mark.parametrize("write", WRITES)
def test_a_write_reaches_the_other_devices_at_the_next_call(way: Way, write: str) -> None:
    has_graph = list(WRITES).index(write) % 2 == 0  # for every other one of them
    module: Any = mlp()
    with way(module) as replicas:
        x = numbers(4, 6)
        kept = outputs(replicas, x)
        module(x).sum().backward()
        if not has_graph:
            del kept
        with torch.inference_mode(write == "in inference"), torch.set_grad_enabled(write != "in inference"):
            WRITES[write](module)
        for _ in range(2):
            found = outputs(replicas, x)
            assert found.dtype == module(x).dtype
            torch.testing.assert_close(found, module(x))
        assert_equal(copies_of(replicas), list(module.parameters()))
        module.zero_grad()
        twin: Any = copy.deepcopy(module)
        for one in (outputs(replicas, x), twin(x)):
            one.sin().mean().backward()
        for mine, other in zip(gradients(module), gradients(twin), strict=True):
            torch.testing.assert_close(mine, other)


# ---------------------------------------------------------------- graphs
def test_a_graph_that_lives_keeps_its_copies(way: Way) -> None:
    module: Any = mlp()
    with way(module, 3) as replicas:
        kept = call(replicas, numbers(6, 6), (2, 2, 2))
        before = [copies_of(replicas, rank) for rank in (1, 2)]
        values = [[one.clone() for one in own] for own in before]
        with torch.no_grad():
            module[2].weight.mul_(2.0)
        assert torch.equal(outputs(replicas, numbers(6, 6), (2, 2, 2)), module(numbers(6, 6)))
        for own, old in zip(before, values, strict=True):
            assert all(map(torch.equal, own, old))
        assert kept.requires_grad


def test_a_backward_lets_the_copies_go(way: Way) -> None:
    with way(mlp()) as replicas:
        loss = call(replicas, numbers(4, 6))
        copies = [weakref.ref(one) for one in copies_of(replicas)]
        outputs(replicas, numbers(4, 6))
        assert all(one() is not None for one in copies)
        loss.backward()
        gc.collect()
        assert not any(one() is not None for one in copies)


def test_a_step_between_them_is_torchs_own_error(way: Way) -> None:
    module: Any = mlp()
    twin: Any = copy.deepcopy(module)
    with way(module) as replicas:
        for net, do in ((module, lambda x: outputs(replicas, x)), (twin, twin)):
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            first, second = do(numbers(4, 6)), do(numbers(4, 6, seed=6))
            second.sum().backward()
            optimizer.step()
            do(numbers(4, 6))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                first.sum().backward()


def test_what_is_frozen_for_another_call_before_a_backward_has_its_whole_gradient(way: Way) -> None:
    module: Any = mlp()
    twin: Any = copy.deepcopy(module)
    with way(module) as replicas:
        for net, do in ((module, lambda x: outputs(replicas, x)), (twin, twin)):
            first = do(numbers(4, 6))
            net[0].requires_grad_(False)
            second = do(numbers(4, 6, seed=6))
            net[0].requires_grad_(True)
            (first.sin().mean() + second.sum()).backward()
        assert_equal(gradients(module), gradients(twin))


def test_weights_of_the_callers_own_before_a_backward(way: Way) -> None:
    """As of a mean teacher, or of MAML."""
    module: Any = mlp()
    twin: Any = copy.deepcopy(module)
    with way(module) as replicas:
        found = []
        for net, do in ((module, lambda x: outputs(replicas, x)), (twin, twin)):
            first = do(numbers(4, 6))
            weights = {name: (2 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
            with torch.nn.utils.stateless._reparametrize_module(net, weights):
                second = do(numbers(4, 6))
            third = do(numbers(4, 6))
            (first.sin().mean() + second.square().mean() * third.mean()).backward()
            found.append([second, *(weight.grad for weight in weights.values())])
        assert_equal(*found)
        assert_equal(gradients(module), gradients(twin))


# ---------------------------------------------------------------- rows of NCCL
def test_a_step_is_one_broadcast_and_one_reduction() -> None:
    module: Any = mlp()
    with wired(module, 3) as replicas:
        sgd = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(2):
            call(replicas, numbers(6, 6), (2, 2, 2)).backward()
            sgd.step()
            sgd.zero_grad()
            assert [kind for kind, _ in taken(replicas)][-2:] == ["broadcast", "reduce"]
        for rank in (1, 2):
            own = copies_of(replicas, rank)
            assert [b.data_ptr() - own[0].data_ptr() for b in own] == [0, 8 * 48, 8 * 56, 8 * 80]
        taken(replicas)
        call(replicas, numbers(6, 6), (2, 2, 2)).backward()
        assert taken(replicas) == [("broadcast", [8 * ROW]), ("reduce", [ROW])]


def test_the_memory_of_copies_is_there_before_anything_is_sent_to_it() -> None:
    cuda = FakeCuda()
    lanes = [StreamLane(CPU, cuda) for _ in range(2)]
    with cuda.stream(cuda.Stream()):
        nccl = fake_link()(lanes, row_sizes(list(mlp().parameters())))
        (own,) = device_copies(list(mlp().parameters()), lanes, nccl)
        cuda.watch("copies", *own)
        for one in own:
            one.detach().add_(1)
        assert nccl is not None
        nccl.close()
    assert not cuda.races


def test_parameters_that_are_frozen_at_first_are_sent_and_their_gradients_summed() -> None:
    module: Any = mlp()
    module[0].requires_grad_(False)
    twin: Any = copy.deepcopy(module)
    with wired(module) as replicas:
        for model in (module, twin):
            model[0].requires_grad_(True)
        taken(replicas)
        call(replicas, numbers(4, 6)).backward()
        twin(numbers(4, 6)).sin().mean().backward()
        assert taken(replicas) == [("broadcast", [8 * ROW]), ("reduce", [ROW])]
        assert_equal(gradients(module), gradients(twin))


def test_other_memory_formats_and_dtypes() -> None:
    torch.manual_seed(1)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.count = nn.Parameter(torch.tensor([2]), requires_grad=False)
            self.empty = nn.Parameter(torch.ones(0, 2))
            self.wide = nn.Parameter(torch.ones(3).double())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(x).mean((1, 2, 3))[:, None] * self.complex.abs()
            return out * self.wide * self.count + self.empty.sum()

    module: Any = Mixed()
    twin: Any = copy.deepcopy(module)
    with wired(module) as replicas:
        x = torch.randn(4, 3, 5, 5)
        taken(replicas)
        call(replicas, x).backward()
        assert [kind for kind, _ in taken(replicas)] == ["broadcast", "reduce"]
        twin(x).sin().mean().backward()
        replica: Any = replicas.modules[1]
        assert replica.conv.weight.stride() == module.conv.weight.stride()
        for mine, other in zip(gradients(module), gradients(twin), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("first", ["card", "host"])
def test_a_card_and_the_cpu_together(first: str) -> None:
    card = StreamLane(CPU, FakeCuda())
    lanes: list[Lane] = [card, HostLane(CPU)] if first == "card" else [HostLane(CPU), card]
    module: Any = mlp()
    twin: Any = copy.deepcopy(module)
    with replicas_of(module, lanes=lanes) as replicas:
        for net, do in ((module, lambda x: outputs(replicas, x)), (twin, twin)):
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for _ in range(2):
                optimizer.zero_grad()
                do(numbers(4, 6)).sin().mean().backward()
                optimizer.step()
        assert_equal(gradients(module), gradients(twin))
        assert all(
            mine is not own for mine, own in zip(copies_of(replicas), module.parameters(), strict=True)
        )


# ---------------------------------------------------------------- gradients
class Branches(nn.Module):
    """A part used by some samples only, an unused part, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 3)
        self.some, self.none = nn.Linear(3, 3), nn.Linear(3, 3)
        self.table = nn.Embedding(5, 3, sparse=True)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) + self.table((x[:, 0] > 0).long())
        if bool((x[:, 1] > 10).any()):
            out = self.some(out)
        return out


@pytest.mark.parametrize("rank", [0, 2])
def test_missing_and_sparse_gradients_are_those_of_one_device(way: Way, rank: int) -> None:
    module: Any = Branches()
    twin: Any = copy.deepcopy(module)
    with way(module, 3) as replicas:
        x = numbers(6, 6)
        x[2 * rank : 2 * rank + 2, 1] = 11.0
        call(replicas, x, (2, 2, 2)).backward()
        torch.cat([twin(part) for part in x.split(2)]).sin().mean().backward()
        assert module.none.weight.grad is None
        assert module.table.weight.grad.is_sparse
        module.table.weight.grad, twin.table.weight.grad = (
            one.table.weight.grad.to_dense() for one in (module, twin)
        )
        assert_equal(gradients(module), gradients(twin))


def test_gradients_that_are_kept_are_not_written_to_by_the_next_sum(way: Way) -> None:
    module: Any = mlp()
    with way(module) as replicas:
        call(replicas, numbers(4, 6)).backward()
        first = [p.grad for p in module.parameters()]
        kept = gradients(module)
        for p in module.parameters():
            p.grad = None
        call(replicas, numbers(4, 6, seed=9)).backward()
        assert_equal(first, kept)
        assert not any(p.grad._is_view() for p in module.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("why", ["a device without samples", "frozen", "a graph of gradients", "the input's"])
def test_the_rest_goes_by_copies(why: str) -> None:
    module: Any = mlp()
    twin: Any = copy.deepcopy(module)
    with wired(module) as replicas:
        taken(replicas)
        found = []
        for net, do in (
            (module, lambda x, *more: outputs(replicas, x, *more)),
            (twin, lambda x, *_: twin(x)),
        ):
            x = numbers(4, 6).requires_grad_()
            if why == "frozen":
                net.requires_grad_(False)
            loss = do(x, *([(4, 0)] if why == "a device without samples" else [])).sin().mean()
            if why == "the input's":
                torch.autograd.backward(loss, inputs=[x])
            else:
                loss.backward(create_graph=why == "a graph of gradients")
            found.append([x.grad])
        assert_equal(*found)
        assert_equal(gradients(module), gradients(twin))
        assert [kind for kind, _ in taken(replicas)] == ["broadcast"]
        module.zero_grad()  # a graph of gradients is a cycle, through them


# ---------------------------------------------------------------- sums
def test_sums_leave_what_they_sum_alone() -> None:
    one, other, third = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    ranks = [[one, None, None], [other, other, None], [None, third, None]]
    assert_equal(add_up(ranks), [third, 5 * one, None])
    assert (one[0], other[0], third[0]) == (1, 2, 3)
    (shared,) = add_up([[one.expand(2)], [one.expand(2)]])
    assert shared is not None
    assert shared.tolist() == [2.0, 2.0]


def test_accumulating_is_what_a_backward_does() -> None:
    weight, other, idle = (nn.Parameter(torch.ones(2)) for _ in range(3))
    weight.grad = torch.ones(2)
    accumulate([weight, other, idle], [torch.full((2,), 2.0), torch.ones(2), None])
    assert_equal([weight.grad, other.grad, idle.grad], [torch.full((2,), 3.0), torch.ones(2), None])
    accumulate([idle], [None])
    accumulate([], [])
    assert idle.grad is None


def test_hooks_are_held_back_for_a_while() -> None:
    weight = nn.Parameter(torch.ones(2))
    seen: list[float] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    assert has_hooks([weight])
    with without_hooks([weight]):
        assert not has_hooks([weight])
        weight.sum().backward()
    weight.sum().backward()
    assert seen == [4.0]
