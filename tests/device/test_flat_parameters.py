import pytest
import torch
from torch import nn

from flowdp.device.copies import ALIGNMENT
from flowdp.device.flat_parameters import FlatReplica
from flowdp.errors import CollectiveError


class Mixed(nn.Module):
    """Parameters and buffers of many kinds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(5)
        self.narrow = nn.Parameter(torch.randn(3, 7, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("table", torch.randn(4, dtype=torch.float64))
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("seen", torch.tensor([True, False]))
        self.register_buffer("nothing", None)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def flat_of(replica: FlatReplica, dtype: torch.dtype):
    (flat,) = [flat for flat in replica.flats if flat.memory.dtype == dtype]
    return flat


def test_values_stay_and_live_in_the_flat_memory():
    module = Mixed()
    before = state(module)
    replica = FlatReplica(module)
    assert_same(state(module), before)
    dtypes = {flat.memory.dtype for flat in replica.flats}
    assert dtypes == {torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool}
    for memory in replica.memories:
        memory.zero_()
    for name, tensor in module.state_dict().items():
        assert not tensor.any(), name


def test_parameters_come_before_the_split_and_buffers_behind():
    module = Mixed()
    replica = FlatReplica(module)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for flat in replica.flats:
        flat.memory[: flat.split] = 0
    assert not any(parameter.any() for parameter in module.parameters())
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert flat_of(replica, torch.float64).split == 0
    assert {flat.memory.dtype for flat in replica.flats if flat.counts} == {torch.int64, torch.bool}
    assert all(flat.split == 0 for flat in replica.flats if flat.counts)


def test_tensors_start_on_cache_lines_and_the_gaps_are_zero():
    module = Mixed()
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data.fill_(1)
    replica = FlatReplica(module)
    tensors = [tensor for tensor in [*module.parameters(), *module.buffers()] if tensor.numel()]
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    ones = sum(int((memory != 0).sum()) for memory in replica.memories)
    assert ones == sum(tensor.numel() for tensor in tensors)  # the complex ones have no imaginary part
    assert all(len(memory) * memory.itemsize % ALIGNMENT == 0 for memory in replica.memories)


def test_an_optimizer_made_before_goes_on_working():
    module = nn.Linear(3, 2)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(module.state_dict())
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (module, twin)]
    weight = module.weight
    replica = FlatReplica(module)
    assert module.weight is weight
    x = torch.randn(5, 3)
    for _ in range(3):
        for each, optimizer in zip((module, twin), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    assert_same(state(module), state(twin))
    assert torch.equal(replica.memories[0][:6].view(2, 3), twin.weight)


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.randn(3, 2).t(), (1, 2)),
        (torch.randn(1, 3).expand(4, 3), (3, 1)),  # elements overlap
        (torch.randn(4, 6)[:, ::2], (3, 1)),  # gaps
    ],
)
def test_dense_strides_are_kept_and_others_made_dense(tensor, strides):
    module = nn.Module()
    module.register_buffer("tensor", tensor)
    before = tensor.clone()
    FlatReplica(module)
    assert module.tensor.stride() == strides
    assert torch.equal(module.tensor, before)


def test_tied_parameters_stay_tied():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight  # one object
    module[2].weight.data = module[0].weight.data  # two objects over one memory
    replica = FlatReplica(module)
    assert flat_of(replica, torch.float32).split == 16 + 3 * 16  # one weight, three padded biases
    replica.memories[0].fill_(7.0)
    assert all(bool((layer.weight == 7).all()) for layer in module)


def test_frozen_parameters_and_sparse_buffers_stay_where_they_are():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    module.register_buffer("graph", torch.eye(3).to_sparse())
    before = module[0].weight.data_ptr()
    replica = FlatReplica(module)
    assert module[0].weight.data_ptr() == before
    assert [len(memory) for memory in replica.memories] == [16 + 16]


def test_a_parameter_that_thaws_is_not_averaged_in_silence():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[0].bias.requires_grad_(False)
    replica, alone = FlatReplica(module, 3), FlatReplica(module, may_thaw=True)
    replica.gather()
    module[0].bias.requires_grad_(True)
    with pytest.raises(CollectiveError, match=r"rank 3: parameter '0.bias' was frozen"):
        replica.gather()
    alone.gather()
    module[1].requires_grad_(False)  # averaging continues with the frozen values
    module[0].bias.requires_grad_(False)
    replica.gather()


def test_a_module_without_anything_to_average_has_no_memory():
    replica = FlatReplica(nn.ReLU())
    replica.gather()
    replica.scatter()
    assert replica.flats == ()


def new_data(module: nn.Module) -> torch.Tensor:
    module.weight.data = torch.full((4,), 3.0)
    return module.weight


def assigned_state(module: nn.Module) -> torch.Tensor:
    module.load_state_dict({**state(module), "running_mean": torch.full((4,), 3.0)}, assign=True)
    return module.running_mean


def computed_anew(module: nn.Module) -> torch.Tensor:
    module.running_mean = torch.zeros(4) + 3.0
    return module.running_mean


def new_parameter(module: nn.Module) -> torch.Tensor:
    module.weight = nn.Parameter(torch.full((4,), 3.0))
    return module.weight


@pytest.mark.parametrize("move", [new_data, assigned_state, computed_anew, new_parameter])
def test_what_the_module_moved_is_gathered_and_scattered(move):
    module = nn.BatchNorm1d(4)
    replica = FlatReplica(module)
    moved = move(module)
    where = moved.data_ptr()
    assert not bool((replica.memories[0] == 3).any())
    replica.gather()
    assert int((replica.memories[0] == 3).sum()) == 4
    replica.memories[0].mul_(2)
    replica.scatter()
    assert torch.equal(moved.detach(), torch.full((4,), 6.0))
    assert moved.data_ptr() == where
    assert not replica.memories[0].requires_grad


def test_what_came_back_is_no_longer_scattered():
    module = nn.BatchNorm1d(4)
    replica = FlatReplica(module)
    home = module.weight.data
    away = torch.full((4,), 3.0)
    module.weight.data = away
    replica.gather()
    module.weight.data = home
    replica.gather()
    replica.memories[0].fill_(5.0)
    replica.scatter()
    assert torch.equal(away, torch.full((4,), 3.0))


# ---------------------------------------------------------------- kept buffers, and the check of the values
def test_buffers_come_back_and_parameters_stay():
    module = Mixed()
    replica = FlatReplica(module)
    module.table = torch.arange(4, dtype=torch.float64)  # outside of the memory from now on
    before = state(module)
    for _ in range(2):
        replica.keep_buffers()
        module.norm(torch.randn(6, 5))
        module.table = module.table + 1
        module.seen.logical_not_()
        module.scale.data.add_(1)
        before["scale"] += 1
        replica.put_back_buffers()
        assert_same(state(module), before)


class Halves(nn.Module):
    """Parameters of two kinds in turn, some of another dtype, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(3, n + 1) for n in range(3))
        self.biases = nn.ParameterList(torch.randn(n + 1) for n in range(3))
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.tied = self.weights[1]
        self.twin = nn.Parameter(self.wide.data)  # another object over the same memory
        self.register_buffer("count", torch.ones(2))


def test_parameters_of_a_group_lie_in_one_piece():
    module = Halves()
    before, parameters = state(module), list(module.parameters())
    groups = dict.fromkeys(parameters, 0) | dict.fromkeys(
        (module.weights[0], module.weights[2], module.wide), 1
    )
    replica = FlatReplica(module, groups=groups)
    assert_same(state(module), before)
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    order = [module.narrow, module.wide, module.tied, *module.biases, module.weights[0], module.weights[2]]
    assert [id(one) for one, _ in replica.parameters()] == [id(one) for one in order]
    flat = flat_of(replica, torch.float32)
    starts = [view.data_ptr() for one, view in replica.parameters() if one.dtype == torch.float32]
    assert starts == sorted(starts)
    assert starts[0] == flat.memory.data_ptr()
    assert starts[-1] < flat.memory[flat.split :].data_ptr() == module.count.data_ptr()
    assert module.twin.data_ptr() == module.wide.data_ptr()
