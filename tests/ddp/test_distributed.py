"""Tests of one rank's DistributedDataParallel, against torch's own with gloo."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective.local_group import local_groups
from flowdp.collective.process_group import ProcessGroup
from flowdp.ddp.distributed import DistributedDataParallel
from flowdp.errors import CollectiveAborted, OptionError
from tests.collective.fake_world import in_threads
from tests.limits import HANG_S
from tests.torch_world import in_processes


class Net(nn.Module):
    """Two branches, of which a batch uses one, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.left = nn.Linear(6, 2)
        self.right = nn.Linear(6, 2)
        self.nobody = nn.Linear(6, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor, is_left: bool) -> Tensor:
        hidden = self.norm(self.inner(x)).tanh()
        out = self.left(hidden) if is_left else self.right(self.inner(hidden[:, :4]))
        return self.frozen(out)


torch.manual_seed(0)
BASE = Net().double()
SIZE = 2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def data(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(5, 4, generator=generator, dtype=torch.float64)


def train(
    rank: int,
    make: Callable[[nn.Module], nn.Module],
    optimizer: str,
    *,
    accumulate: bool,
    set_to_none: bool,
) -> dict[str, Any]:
    """A loop with everything that can differ between two ranks; returns the model's values at the end."""
    model = make(copy.deepcopy(BASE))
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(8):

        def backward(part: int, step: int = step) -> None:
            # Both branches, one on each rank, or the same on both: the other one has no gradient then.
            is_left = bool((step + rank) % 2) if step % 3 else step % 2 == 0
            model(data(rank, 2 * step + part), is_left).square().mean().backward()

        stepper.zero_grad(set_to_none=set_to_none)
        if accumulate:
            with model.no_sync():
                backward(0)
        backward(1)
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.05)
        stepper.step()
    # As lists: tensors would go through shared memory.
    state = model.state_dict()
    prefix = "module." if "module.norm.weight" in state else ""
    kept = {name: state[prefix + name].tolist() for name in BASE.state_dict()}
    kept["no rank has a gradient"] = model.get_parameter(f"{prefix}nobody.weight").grad is not None
    return kept


CASES = [
    {"optimizer": "sgd", "accumulate": False, "set_to_none": True},
    {"optimizer": "sgd", "accumulate": True, "set_to_none": False},
    {"optimizer": "adamw", "accumulate": True, "set_to_none": True},
]


def under_gloo(rank: int) -> list[dict[str, dict[str, Any]]]:
    group = ProcessGroup.from_torch()

    def torchs(module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)

    return [
        {
            "torch": train(rank, torchs, **case),
            "ours": train(rank, lambda module: DistributedDataParallel(module, group), **case),
        }
        for case in CASES
    ]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, dict[str, Any]]]]:
    return in_processes(under_gloo, tmp_path_factory.mktemp("gloo"), SIZE)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, numbers in wanted.items():
        close = torch.allclose(
            torch.tensor(found[name], dtype=torch.float64),
            torch.tensor(numbers, dtype=torch.float64),
            rtol=1e-12,
            atol=1e-12,
        )
        assert close, name


def each(size: int, body: Callable[[ProcessGroup], Any], timeout: float = HANG_S) -> list[Any]:
    groups = local_groups(["cpu"] * size, timeout=timeout)
    return in_threads(range(size), lambda rank: body(groups[rank]))


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda number: " ".join(map(str, CASES[number].values()))
)
@pytest.mark.parametrize(
    ("strategy", "is_view"), [("synchronous", True), ("overlapped", True), ("overlapped", False)]
)
def test_ranks_in_threads_equal_torchs_ddp(gloo, number, strategy, is_view):
    def body(group: ProcessGroup) -> dict[str, Any]:
        def ours(module: nn.Module) -> nn.Module:
            return DistributedDataParallel(
                module, group, strategy=strategy, gradient_as_bucket_view=is_view, bucket_bytes=200
            )

        return train(group.rank, ours, **CASES[number])

    for rank, found in enumerate(each(SIZE, body)):
        wanted = gloo[rank][number]["torch"]
        assert_equal(found, wanted)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_ranks_of_torchrun_equal_torchs_ddp(gloo, number):
    for rank in range(SIZE):
        assert_equal(gloo[rank][number]["ours"], gloo[rank][number]["torch"])


# ---------------------------------------------------------------- the module
def test_state_has_the_modules_own_names():
    model = DistributedDataParallel(copy.deepcopy(BASE), ProcessGroup.single())
    assert list(model.state_dict()) == list(BASE.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in BASE.named_parameters()]
    larger = nn.Sequential(model, nn.Linear(2, 2))
    assert "0.inner.weight" in larger.state_dict()
    other = copy.deepcopy(BASE)
    other.inner.weight.data.fill_(3.0)
    model.load_state_dict(other.state_dict())
    assert (model.module.inner.weight == 3.0).all()
    assert isinstance(model.module, Net)


def test_all_start_from_rank_0():
    def body(group: ProcessGroup) -> dict[str, Tensor]:
        module = copy.deepcopy(BASE)
        for tensor in module.state_dict().values():
            tensor.fill_(group.rank + 1)
        assert DistributedDataParallel(module, group, bucket_bytes=100).process_group is group
        return module.state_dict()

    for state in each(3, body):
        assert all((tensor == 1).all() for tensor in state.values())


def test_replicas_that_differ_are_named_on_every_rank():
    def body(group: ProcessGroup) -> None:
        module = copy.deepcopy(BASE)
        if group.rank == 1:
            module.left = nn.Linear(6, 3).double()
        DistributedDataParallel(module, group)

    for error in each(3, body):
        assert isinstance(error, OptionError)
        assert "'left.weight' is float64 (3, 6) on rank 1" in str(error)
        assert "float64 (2, 6) on rank 0" in str(error)


def test_it_is_not_copied():
    model = DistributedDataParallel(nn.Linear(2, 2), ProcessGroup.single())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"its \.module"):
            copied(model)
        copied(model.module)


def buffers_after(act: Callable[[DistributedDataParallel, Tensor], object], **options: Any) -> list[bool]:
    """Whether the ranks' statistics, different before, are equal after `act` in eval mode."""

    def body(group: ProcessGroup) -> Tensor:
        model = DistributedDataParallel(nn.BatchNorm1d(4).double(), group, **options)
        model.module.running_mean.fill_(group.rank)
        act(model, data(0, 0))
        return model.module.running_mean

    first, second = each(2, body)
    return torch.equal(first, second)


def test_buffers_are_rank_0s_in_a_training_forward_alone():
    def without_grad(model: DistributedDataParallel, x: Tensor) -> None:
        with torch.no_grad():
            model(x)

    def without_sync(model: DistributedDataParallel, x: Tensor) -> None:
        with model.no_sync():
            model(x)
            model.module.running_mean.fill_(model.process_group.rank)
            model(x)

    assert buffers_after(lambda model, x: model(x))
    assert not buffers_after(lambda model, x: model(x), broadcast_buffers=False)
    assert not buffers_after(lambda model, x: model.eval()(x))
    assert not buffers_after(lambda model, x: (model.module.eval(), model(x)))
    assert not buffers_after(without_grad)
    assert not buffers_after(without_sync)
    assert not buffers_after(lambda model, x: (without_sync(model, x), model(x)))
    assert buffers_after(lambda model, x: (without_sync(model, x), model(x), model(x)))


def test_two_forwards_before_a_backward():
    """Sending buffers leaves no trace in the first one's graph."""

    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(copy.deepcopy(BASE), group)
        (model(data(0, 0), True).sum() + model(data(0, 1), False).sum()).backward()

    assert each(2, body) == [None, None]


# ---------------------------------------------------------------- gradients


def test_sync_gradients_after_no_sync():
    def body(group: ProcessGroup) -> Tensor:
        model = DistributedDataParallel(copy.deepcopy(BASE), group)
        with model.no_sync():
            model(data(group.rank, 0), True).square().mean().backward()
        model.sync_gradients()
        return model.module.left.weight.grad

    first, second = each(2, body)
    assert torch.equal(first, second)


def test_a_layer_unfrozen_on_the_way():
    def body(group: ProcessGroup) -> list[Tensor | None]:
        model = DistributedDataParallel(copy.deepcopy(BASE), group)
        for is_trained in (False, True, False):
            model.module.frozen.requires_grad_(is_trained)
            model.zero_grad()
            model(data(group.rank, 0), True).square().mean().backward()
            if is_trained:
                trained = model.module.frozen.weight.grad.clone()
        return [trained, model.module.left.weight.grad, model.module.frozen.weight.grad]

    first, second = each(2, body)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert first[2] is second[2] is None


def test_a_rank_that_fails_can_release_the_others():
    def body(group: ProcessGroup) -> None:
        model = DistributedDataParallel(copy.deepcopy(BASE), group)
        try:
            if group.rank == 1:
                raise KeyError("bad sample")
            model(data(0, 0), True).square().mean().backward()
        except KeyError as error:
            group.abort(f"{error!r}")
            raise

    waiting, failed = each(2, body, timeout=1e6)
    assert isinstance(waiting, CollectiveAborted)
    assert str(waiting) == "rank 1 gave up: KeyError('bad sample')"
    assert isinstance(failed, KeyError)


def test_one_rank_is_a_plain_module():
    model = DistributedDataParallel(copy.deepcopy(BASE), ProcessGroup.single())
    plain = copy.deepcopy(BASE)
    for module in (model, plain):
        module(data(0, 0), True).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
