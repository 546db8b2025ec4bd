"""Tests of SyncBatchNorm over threads: equal to one rank with the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import SharedStatistics, call_groups, min_part_size, plain_layers
from flowdp.collective.local_group import local_groups
from flowdp.collective.process_group import ProcessGroup
from flowdp.device.streams import open_lanes
from flowdp.errors import CollectiveAborted, CollectiveError, FlowdpError
from tests.collective.fake_world import in_threads
from tests.limits import HANG_S
from tests.loops import assert_equal, numbers

CHANNELS = 3
convert = nn.SyncBatchNorm.convert_sync_batchnorm


Body = Callable[[int, nn.Module, Tensor], Any]
"""Function of the rank, its copy of the model and its part of the batch."""


def each(sizes: Sequence[int], body: Body, model: nn.Module, x: Tensor) -> list[Any]:
    """Call the body for each rank in its thread; returns the results, or raises the first error."""
    groups = local_groups(["cpu"] * len(sizes), timeout=HANG_S)
    parts = [part.detach().requires_grad_(x.requires_grad) for part in x.split(list(sizes))]
    models = [copy.deepcopy(model) for _ in sizes]

    def run(rank: int) -> Any:
        shared = SharedStatistics(models[rank])
        try:
            with torch.autograd.set_multithreading_enabled(False), shared.among(groups[rank]):
                return body(rank, models[rank], parts[rank])
        finally:
            groups[rank].close()

    found = in_threads(range(len(sizes)), run)
    for one in sorted(found, key=lambda one: isinstance(one, CollectiveAborted)):
        if isinstance(one, Exception):
            raise one
    return found


def buffers(module: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in module.buffers()]


def compare(norm: nn.Module, x: Tensor, sizes: Sequence[int], *, passes: int = 2) -> None:
    """Assert that outputs, gradients and buffers of the parts are those of plain BatchNorm on the whole."""
    upstream = numbers(*x.shape, seed=11)
    x.requires_grad_(True)

    def train(
        model: nn.Module, part: Tensor, given: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        for _ in range(passes):
            out = model(part)
        (out.sin() * given).sum().backward()
        assert part.grad is not None
        return (
            out.detach(),
            part.grad,
            [p.grad for p in model.parameters() if p.grad is not None],
            buffers(model),
        )

    given = upstream.split(list(sizes))
    found = each(sizes, lambda rank, model, part: train(model, part, given[rank]), convert(norm), x=x)
    out, of_x, of_parameters, kept = train(norm, x.detach().requires_grad_(), upstream)
    assert_equal([torch.cat([one[0] for one in found])], [out])
    assert_equal([torch.cat([one[1] for one in found])], [of_x])
    assert_equal(
        [torch.stack(column).sum(0) for column in zip(*(one[2] for one in found), strict=True)], of_parameters
    )
    for one in found:
        assert_equal(one[3], kept)


KINDS: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (), (9,)),
    (nn.BatchNorm1d, (4,), (1, 8)),
    (nn.BatchNorm2d, (4, 2), (4, 5)),
    (nn.BatchNorm3d, (2, 2, 3), (2, 3, 4)),
]


@pytest.mark.parametrize(("kind", "rest", "sizes"), KINDS)
def test_parts_of_a_batch_are_normalised_as_the_whole(
    kind: Any, rest: tuple[int, ...], sizes: Sequence[int]
) -> None:
    norm = kind(CHANNELS).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(numbers(CHANNELS, seed=2))
    compare(norm, numbers(9, CHANNELS, *rest) * 3 + 100, sizes)


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5}, {"momentum": 0.0}],
)
def test_options_of_the_layer(options: dict[str, Any]) -> None:
    compare(nn.BatchNorm1d(CHANNELS, **options).double(), numbers(9, CHANNELS), (2, 7))


def test_several_layers_and_one_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS)
            self.mix = nn.Linear(CHANNELS, CHANNELS)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.one(self.other(self.mix(self.one(x))).tanh())
            return found

    torch.manual_seed(0)
    compare(Twice().double(), numbers(9, CHANNELS), (3, 6))


def test_layers_in_eval_mode_meet_nobody() -> None:
    norm = nn.BatchNorm1d(CHANNELS).double().eval()
    x = numbers(4, CHANNELS)

    def look(rank: int, model: nn.Module, part: Tensor) -> Tensor | None:
        return model(part) if rank else None  # the other rank does not call it

    assert_equal([each((2, 2), look, convert(norm), x)[1]], [norm(x[2:])])


def test_without_gradients_the_running_statistics_follow() -> None:
    norm, x = nn.BatchNorm1d(CHANNELS).double(), numbers(6, CHANNELS)

    def look(rank: int, model: nn.Module, part: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [model(part), *model.buffers()]

    found = each((2, 4), look, convert(norm), x)
    assert_equal([torch.cat([one[0] for one in found]), *found[1][1:]], [norm(x), *norm.buffers()])


# Wholly of the narrow type, or as under autocast.
@pytest.mark.parametrize(("dtype", "whole"), [(torch.bfloat16, True), (torch.float16, False)])
def test_narrow_types_are_added_up_in_wide_ones(dtype: torch.dtype, whole: bool) -> None:
    norm = nn.BatchNorm1d(CHANNELS)
    x = (numbers(64, CHANNELS) + 30).to(dtype)
    twin = copy.deepcopy(norm)
    wanted = twin(x.float())
    wanted.square().mean().backward()

    def look(rank: int, model: nn.Module, part: Tensor) -> tuple[Tensor, Any]:
        model = model.to(dtype) if whole else model
        out = model(part.requires_grad_())
        (out.float().square().mean() / 2).backward()
        assert out.dtype == part.grad.dtype == dtype
        return out.detach().float(), [p.grad.float() for p in model.parameters()]

    found = each((32, 32), look, convert(norm), x)
    torch.testing.assert_close(torch.cat([one[0] for one in found]), wanted.detach(), atol=0.05, rtol=0.02)
    for mine, other, parameter in zip(found[0][1], found[1][1], twin.parameters(), strict=True):
        torch.testing.assert_close(mine + other, parameter.grad, atol=0.05, rtol=0.02)


def test_losses_that_count_unequally() -> None:
    """Each rank's loss is the mean over its part; samples weight them only afterwards."""
    norm, x, sizes = nn.BatchNorm1d(CHANNELS).double(), numbers(9, CHANNELS), (2, 7)
    whole = x.clone().requires_grad_()
    norm(whole).sin().mean().backward()
    groups, parts = local_groups(["cpu"] * 2, timeout=HANG_S), x.split(sizes)

    def run(rank: int) -> Tensor:
        model, part = convert(copy.deepcopy(norm)), parts[rank].clone().requires_grad_()
        shared = SharedStatistics(model)
        with torch.autograd.set_multithreading_enabled(False), shared.among(groups[rank], sizes[rank]):
            model(part).sin().mean().backward()
        assert part.grad is not None
        return part.grad * sizes[rank] / 9

    assert_equal([torch.cat(in_threads(range(2), run))], [whole.grad])


def test_a_rank_that_fails_lets_the_others_go() -> None:
    def fail(rank: int, model: nn.Module, part: Tensor) -> None:
        if rank:
            raise KeyError("mine")
        with pytest.raises(CollectiveAborted, match="rank 1 has closed its group and does not call"):
            model(part)

    with pytest.raises(KeyError):
        each((2, 2), fail, convert(nn.BatchNorm1d(CHANNELS).double()), numbers(4, CHANNELS))


def test_a_part_that_never_began_is_not_waited_for() -> None:
    errors: SimpleQueue[str] = SimpleQueue()

    def meet(group: ProcessGroup) -> None:
        try:
            group.barrier()
        except CollectiveAborted as error:
            errors.put(str(error))

    with suppress(KeyError), call_groups(open_lanes([torch.device("cpu")] * 2), [0, 1]) as groups:
        thread = threading.Thread(target=meet, args=(groups[0],), daemon=True)
        thread.start()
        raise KeyError("before the other part")
    assert errors.get(timeout=HANG_S).startswith("rank 1 has closed its group")
    thread.join(HANG_S)


def test_one_rank_alone_needs_no_group() -> None:
    with call_groups(open_lanes([torch.device("cpu")]), [0]) as groups:
        assert groups.get(0) is None


def test_ranks_in_different_layers_are_told() -> None:
    model = convert(nn.Sequential(nn.BatchNorm1d(CHANNELS), nn.BatchNorm1d(CHANNELS)).double())

    def look(rank: int, model: Any, part: Tensor) -> None:
        model[rank](part)

    with pytest.raises(CollectiveError, match=r"calls differ: .*'0'.*'1'|calls differ: .*'1'.*'0'"):
        each((2, 2), look, model, numbers(4, CHANNELS))


def test_a_gradient_of_a_gradient_is_refused_whoever_asks() -> None:
    def look(rank: int, model: nn.Module, part: Tensor) -> None:
        part.requires_grad_()
        with pytest.raises(FlowdpError, match="gradient of a gradient"):
            torch.autograd.grad(model(part).sum(), part, create_graph=True)

    each((2, 2), look, convert(nn.BatchNorm1d(CHANNELS).double()), numbers(4, CHANNELS))


def test_a_backward_that_one_rank_runs_alone_is_refused() -> None:
    x = numbers(4, CHANNELS).requires_grad_()
    outs = each(
        (2, 2),
        lambda rank, model, part: model(part),
        convert(nn.BatchNorm1d(CHANNELS).double()),
        x=x,
    )
    with pytest.raises(AssertionError, match="on one device alone"):
        outs[0].sum().backward()


def test_what_a_part_needs() -> None:
    plain, other = nn.BatchNorm1d(2), nn.InstanceNorm1d(2)
    model = nn.Sequential(plain, other, nn.SyncBatchNorm(2))
    assert plain_layers(model) == [plain]
    assert min_part_size([plain]) == 2
    assert min_part_size([plain.eval()]) == 1
    # Without running statistics torch requires it in eval mode, too.
    assert min_part_size([nn.BatchNorm1d(2, track_running_stats=False).eval()]) == 2
    assert min_part_size([]) == 1
