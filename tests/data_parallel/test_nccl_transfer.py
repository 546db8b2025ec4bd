"""Tests of parameters and gradients over NCCL, and of those that take another way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.data_parallel.nccl_transfer import Copying, NcclTransfer
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.scatter import Arguments, call_module
from flowdp.data_parallel.sharded_call import call_sharded, collect_gradients, cut
from flowdp.device.streams import StreamLane
from tests.fakes import FakeCuda
from tests.loops import CPU, assert_equal, gradients, mlp, numbers, replicas_of
from tests.wired import fake_link, wired


def call(replicas: Replicas, x: Tensor, sizes: tuple[int, ...] = (2, 2), **options: Any) -> Tensor:
    out: Tensor = call_sharded(replicas, cut(Arguments((x,)), sizes), call_module, **options)
    return out.sin().mean()


def taken(replicas: Any) -> list[tuple[str, list[int]]]:
    """The groups of NCCL since the last call: kind, and counts (bytes in a broadcast)."""
    nccl = replicas.nccl
    found = [(kind, counts) for kind, (_, counts) in zip(nccl.kinds, nccl.groups, strict=True)]
    nccl.kinds.clear()
    nccl.groups.clear()
    return found


WEIGHTS = [48, 8, 24, 3]  # elements per parameter of `mlp`; in float64 each is aligned to 8
ROW = 48 + 8 + 24 + 8


def test_a_step_is_one_broadcast_and_one_reduction() -> None:
    module = mlp()
    with wired(module, 3) as replicas:
        sgd = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(2):
            call(replicas, numbers(6, 6), (2, 2, 2)).backward()
            sgd.step()
            assert taken(replicas) == [("broadcast", [8 * ROW]), ("reduce", [ROW])]
        for replica in replicas.modules[1:]:
            own = list(replica.parameters())
            assert [b.data_ptr() - own[0].data_ptr() for b in own] == [0, 8 * 48, 8 * 56, 8 * 80]


def test_replicas_have_their_values_before_anything_is_sent() -> None:
    with wired(mlp()) as replicas:
        assert_equal(list(replicas.modules[1].parameters()), list(replicas.modules[0].parameters()))


def test_the_replicas_memory_is_there_before_anything_is_sent_to_it() -> None:
    cuda = FakeCuda()
    lanes = [StreamLane(CPU, cuda) for _ in range(2)]
    with replicas_of(mlp(), lanes=lanes, link=fake_link()):
        stream: Any = lanes[1].compute
        assert cuda.host[stream.number] == stream.time  # the host has waited


def test_what_has_changed_is_sent_and_nothing_else() -> None:
    module: Any = mlp()
    with wired(module) as replicas, torch.no_grad():
        call(replicas, numbers(4, 6))
        taken(replicas)
        call(replicas, numbers(4, 6))
        assert taken(replicas) == []
        module[0].weight.add_(1)
        call(replicas, numbers(4, 6))
        assert taken(replicas) == [("broadcast", [8 * 48])]
        module[0].weight.add_(1)
        module[2].weight.add_(1)
        module[2].bias.add_(1)
        call(replicas, numbers(4, 6))
        assert taken(replicas) == [("broadcast", [8 * 48, 8 * 32])]
        assert_equal(list(replicas.modules[1].parameters()), list(module.parameters()))
        module[0].weight.requires_grad_(False)
        call(replicas, numbers(4, 6))
        assert taken(replicas) == []  # a flag is not a value
        assert not next(replicas.modules[1].parameters()).requires_grad
        replicas.forget()
        call(replicas, numbers(4, 6))
        assert taken(replicas) == [("broadcast", [8 * ROW])]


def test_a_device_without_samples_is_sent_what_all_are() -> None:
    module: Any = mlp()
    with wired(module, 3) as replicas, torch.no_grad():
        for _ in range(3):
            call(replicas, numbers(4, 6), (2, 2, 0))
        assert len(taken(replicas)) == 1
        module[0].weight.add_(1)
        call(replicas, numbers(4, 6), (4, 0, 0))
        taken(replicas)
        call(replicas, numbers(4, 6), (1, 1, 2))
        assert taken(replicas) == []
        assert_equal(list(replicas.modules[2].parameters()), list(module.parameters()))


def test_a_parameter_that_a_replica_has_moved_is_copied() -> None:
    module: Any = mlp()
    with wired(module) as replicas, torch.no_grad():
        call(replicas, numbers(4, 6))
        other: Any = replicas.modules[1]
        other[0].weight.data = other[0].weight.data.clone()
        taken(replicas)
        for parameter in module.parameters():
            parameter.add_(1)
        call(replicas, numbers(4, 6))
        assert taken(replicas) == [("broadcast", [8 * (ROW - 48)])]
        assert_equal(list(other.parameters()), list(module.parameters()))


def test_parameters_of_one_memory_stay_together() -> None:
    """Like cuDNN's of an LSTM: a write to one of them may be a write to all."""
    memory = torch.ones(8, dtype=torch.float64)
    module: Any = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4)).double()
    module[0].weight.data, module[1].weight.data = memory[:4].view(1, 4), memory[4:].view(4, 1)
    with wired(module) as replicas:
        assert isinstance(replicas.transfer, NcclTransfer)
        assert [replicas.transfer.carries(index) for index in range(4)] == [False, True, False, True]
        call(replicas, numbers(4, 4)).backward()  # gradients still go over NCCL
        assert [kind for kind, _ in taken(replicas)] == ["broadcast", "reduce"]


def test_without_anything_to_train_there_is_no_nccl() -> None:
    with replicas_of(mlp().requires_grad_(False), link=lambda *_: pytest.fail("opened")) as replicas:
        assert replicas.transfer is None
    with replicas_of(mlp(), link=lambda *_: None) as replicas:
        assert replicas.transfer is None


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
        out = self.body(x) + self.table((x[:, 0] > 0).long())
        return self.some(out) if bool((x[:, 1] > 10).any()) else out


def test_missing_and_sparse_gradients_are_those_of_one_device() -> None:
    module = Branches()
    twin: Any = copy.deepcopy(module)
    with wired(module, 3) as replicas:
        x = numbers(6, 6)
        x[:2, 1] = 11.0  # the first device's part
        call(replicas, x, (2, 2, 2)).backward()
        torch.cat([twin(part) for part in x.split(2)]).sin().mean().backward()
        assert [kind for kind, _ in taken(replicas)] == ["broadcast", "reduce"]
        assert module.none.weight.grad is None
        assert module.table.weight.grad.is_sparse
        module.table.weight.grad, twin.table.weight.grad = (
            one.table.weight.grad.to_dense() for one in (module, twin)
        )
        assert_equal(gradients(module), gradients(twin))


def test_gradients_that_are_kept_are_not_written_to_by_the_next_sum() -> None:
    module = mlp()
    with wired(module) as replicas:
        call(replicas, numbers(4, 6)).backward()
        first = [p.grad for p in module.parameters()]
        kept = gradients(module)
        for p in module.parameters():
            p.grad = None
        call(replicas, numbers(4, 6, seed=9)).backward()
        assert_equal(first, kept)
        assert not any(p.grad._is_view() for p in module.parameters() if p.grad is not None)


def test_a_thawed_parameter_is_copied_and_its_gradient_is_summed() -> None:
    module: Any = mlp()
    module[0].requires_grad_(False)
    twin: Any = copy.deepcopy(module)
    with wired(module) as replicas:
        for model in (module, twin):
            model[0].requires_grad_(True)
        call(replicas, numbers(4, 6)).backward()
        twin(numbers(4, 6)).sin().mean().backward()
        assert taken(replicas) == [("broadcast", [8 * 32]), ("reduce", [ROW])]
        assert_equal(gradients(module), gradients(twin))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("why", ["a device without samples", "asked for", "frozen", "a graph of gradients"])
def test_the_rest_goes_by_copies(why: str) -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with wired(module) as replicas:
        call(replicas, numbers(4, 6))
        taken(replicas)
        x = numbers(4, 6).requires_grad_()
        if why == "frozen":
            module.requires_grad_(False)
            call(replicas, x).backward()
        elif why == "asked for":
            torch.autograd.grad(call(replicas, x), list(module.parameters()))
        elif why == "a graph of gradients":
            call(replicas, x).backward(create_graph=True)
            module.zero_grad()
        else:
            call(replicas, x, (4, 0)).backward()
            twin(x).sin().mean().backward()
            assert_equal(gradients(module), gradients(twin))
        assert taken(replicas) == []


def test_gradients_that_were_left_come_with_the_next_sum_or_by_copies() -> None:
    module = mlp()
    twin = copy.deepcopy(module)
    with wired(module) as replicas:
        for sync in (False, True):
            call(replicas, numbers(4, 6), sync=sync).backward()
        assert [kind for kind, _ in taken(replicas)] == ["broadcast", "reduce"]
        call(replicas, numbers(4, 6), sync=False).backward()
        collect_gradients(replicas)
        assert taken(replicas) == []
    for _ in range(3):
        twin(numbers(4, 6)).sin().mean().backward()
    assert_equal(gradients(module), gradients(twin))


def test_a_write_between_forward_and_backward_is_found_on_all_devices() -> None:
    module: Any = mlp()
    with wired(module) as replicas:
        loss = call(replicas, numbers(4, 6), (0, 4))
        with torch.no_grad():
            module[2].weight.mul_(2)
        call(replicas, numbers(4, 6))  # copies the write to the replica
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_copies_are_summed_rank_after_rank() -> None:
    carrier = Copying(CPU)
    packed = [carrier.pack([torch.ones(2), None], CPU), carrier.pack([torch.ones(2), None], CPU)]
    assert_equal(carrier.sum(packed), [torch.full((2,), 2.0), None])
