"""BatchNorm over ranks that train parts of one batch.

Plain BatchNorm normalises each rank's part separately, which needs two samples at least. The layers of
`torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` are synchronised here over ranks that are threads of
this process, as torch's own forward needs one process per rank. Forward adds up counts, means and variances
(Chan's formula, in float64); backward adds up the two sums of the incoming gradient that pass through mean
and variance.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flowdp.collective.local_group import group_lanes
from flowdp.collective.mean import arithmetic, flat_view
from flowdp.collective.process_group import ProcessGroup
from flowdp.device.accelerator import is_accelerator
from flowdp.device.streams import Lane
from flowdp.errors import FlowdpError, OptionError
from flowdp.machine.policies import ROUNDS
from flowdp.options import Policy

__all__ = [
    "PARTS_ALONE",
    "RankGroups",
    "SharedStatistics",
    "call_groups",
    "check_sync_batch_norm",
    "min_part_size",
    "plain_layers",
    "taking_part",
]

PARTS_ALONE = (
    "BatchNorm sees each device's part of a batch only; for statistics of all devices together, on one "
    "machine: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
)
"""Warning about `plain_layers` whose `min_part_size` is 2."""


def plain_layers(module: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers that normalise each rank's part separately; InstanceNorm is not one."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
    ]


def min_part_size(layers: Sequence[_BatchNorm]) -> int:
    """Smallest number of samples in a rank's part of a batch: 2 where a variance is computed, else 1.

    Of `plain_layers`, those that use their running statistics compute none.
    """
    return 2 if any(_takes_statistics(layer) for layer in layers) else 1


def check_sync_batch_norm(model: nn.Module, policy: Policy, devices: Sequence[torch.device]) -> None:
    """Check that the SyncBatchNorm layers of the ranks' models can be synchronised over the ranks.

    Raises:
        OptionError: They cannot be synchronised.
    """
    if len(devices) == 1 or not SharedStatistics(model):
        return
    if ROUNDS[policy].averages != "gradients":
        raise OptionError(
            f"SyncBatchNorm takes the statistics of one batch from all devices, and under policy={policy!r} "
            "each device trains batches of its own: use policy='exact', or leave the model unconverted"
        )
    if len({device.type for device in devices}) > 1:
        raise OptionError(
            f"SyncBatchNorm is synchronised among CPU devices or among GPUs, not among "
            f"{', '.join(map(str, devices))}: give devices of one kind, or use GroupNorm"
        )


class SharedStatistics:
    """The SyncBatchNorm layers of one rank's module.

    The module is changed only within `among`.

    Attributes:
        group: Process group of the ranks that have a part of the current batch; None outside of `among`.
        weight: Weight of this rank's loss in the sum of the gradients, relative to the other ranks.

    Threads:
        The thread of the rank.
    """

    def __init__(self, module: nn.Module) -> None:
        self.group: ProcessGroup | None = None
        self.weight = 1.0
        self._layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.SyncBatchNorm) and type(layer).forward is nn.SyncBatchNorm.forward
        }

    def __bool__(self) -> bool:
        """Whether the module has such layers."""
        return bool(self._layers)

    @contextmanager
    def among(
        self, group: ProcessGroup | None, weight: float = 1.0, *, keeps: bool = False
    ) -> Iterator[None]:
        """Compute statistics over all ranks of a group in forward and backward of the module.

        Args:
            group: Process group of the ranks that call the module at the same time; None: statistics stay
                those of this rank.
            weight: See the attribute.
            keeps: Use the group also for a backward after this context.
        """
        if group is None or not self._layers:
            yield
            return
        self.group, self.weight = group, weight
        for name, layer in self._layers.items():
            layer.__dict__["forward"] = partial(_forward, layer, name, self)
        try:
            yield
        finally:
            for layer in self._layers.values():
                del layer.__dict__["forward"]
            self.group = group if keeps else None


@contextmanager
def taking_part(shared: SharedStatistics, group: ProcessGroup | None) -> Iterator[None]:
    """Context of one call of a rank, with a group made for it. Its end or error releases the other ranks."""
    if group is None:
        yield
        return
    try:
        with shared.among(group):
            yield
    except BaseException as error:
        group.abort(f"{type(error).__name__} beside SyncBatchNorm")
        raise
    finally:
        group.close()


class RankGroups:
    """Process groups of the ranks that have a part of a batch, one for each set of ranks.

    Threads:
        Any: each rank calls the methods in its thread.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], dict[int, ProcessGroup]] = {}
        self._gone: set[int] = set()

    def of(self, rank: int, ranks: Sequence[int]) -> ProcessGroup | None:
        """The group of a rank while it works on its part; None where no other rank has a part."""
        if len(ranks) < 2:
            return None
        with self._lock:
            key = tuple(ranks)
            if key not in self._groups:
                made = group_lanes([self._lanes[member] for member in key], threading.TIMEOUT_MAX)
                self._groups[key] = dict(zip(key, made, strict=True))
                for member in self._gone.intersection(key):
                    self._groups[key][member].close()
            return self._groups[key][rank]

    def leave(self, rank: int) -> None:
        """Close the groups of a rank that makes no more calls: ranks that wait for it raise an error."""
        with self._lock:
            self._gone.add(rank)
            for groups in self._groups.values():
                if rank in groups:
                    groups[rank].close()


@contextmanager
def call_groups(lanes: Sequence[Lane], ranks: Sequence[int]) -> Iterator[dict[int, ProcessGroup | None]]:
    """Groups for one call of the ranks that have a part in it, by rank; one alone needs none.

    An error inside ends them: a part that never began is waited for, else.
    """
    if len(ranks) < 2:
        yield {}
        return
    groups = RankGroups(lanes)
    try:
        yield {rank: groups.of(rank, ranks) for rank in ranks}
    except BaseException:
        for rank in ranks:
            groups.leave(rank)
        raise


def _takes_statistics(layer: _BatchNorm) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def _forward(layer: nn.SyncBatchNorm, name: str, shared: SharedStatistics, values: Tensor) -> Tensor:
    group = shared.group
    assert group is not None  # this stands in the layer's place within `among` alone
    if not _takes_statistics(layer):
        return nn.SyncBatchNorm.forward(layer, values)
    with torch.no_grad():
        mean, variance, count = _statistics(values.detach(), group, f"forward of {name!r}")
        if layer.training and layer.track_running_stats:
            _track(layer, mean, variance, count)
    normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        values, layer.weight, layer.bias, mean, variance, count, layer.eps, name, shared
    )
    return normalised


def _statistics(values: Tensor, group: ProcessGroup, what: str) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over all ranks, and the number of values. In float64."""
    channels = values.size(1)
    rows = torch.zeros(group.size, 2 * channels + 1, dtype=torch.float64, device=values.device)
    row = rows[group.rank]
    if values.numel():
        wide = values.to(arithmetic(values.dtype))
        variance, mean = torch.var_mean(wide, _others(values), correction=0)
        row[0] = values.numel() // channels
        row[1 : channels + 1] = mean
        row[channels + 1 :] = variance
    _add_up(group, rows, what)
    counts, means, variances = rows.split([1, channels, channels], dim=1)
    count = counts.sum()
    # Not read from an accelerator: with a value on each rank there are two.
    if not is_accelerator(count.device) and count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {int(count)}")
    mean = (means * counts).sum(0) / count
    # The variance within the parts plus that of their means.
    variance = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, variance, count


def _track(layer: nn.SyncBatchNorm, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    share: Tensor | float | None = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if share is None:
            share = 1.0 / layer.num_batches_tracked.double()
    of_new = torch.as_tensor(0.0 if share is None else share, dtype=mean.dtype, device=mean.device)
    for running, new in ((layer.running_mean, mean), (layer.running_var, variance * (count / (count - 1)))):
        if running is not None:
            running.lerp_(new.to(running.dtype), of_new.to(running.dtype))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        name: str,
        shared: SharedStatistics,
    ) -> Tensor:
        dtype = arithmetic(values.dtype)
        mean, variance = mean.to(dtype), variance.to(dtype)
        ctx.save_for_backward(values, weight, mean, (variance + eps).rsqrt(), count)
        ctx.name, ctx.shared = name, shared
        weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (weight, bias))
        return F.batch_norm(values, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise FlowdpError(
                "a gradient of a gradient (create_graph=True) does not go through SyncBatchNorm over several "
                "devices; use GroupNorm, or plain BatchNorm"
            )
        values, weight, mean, scale, count = ctx.saved_tensors
        shape = [1, -1, *(1 for _ in range(values.dim() - 2))]
        dims = _others(values)
        away = (values.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        wide = given.to(mean.dtype)
        sums = torch.stack([wide.sum(dims), (wide * away).sum(dims)])
        of_weight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = (
            sums[0].to(values.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        )
        of_values = None
        if ctx.needs_input_grad[0]:
            shared: SharedStatistics = ctx.shared
            assert shared.group is not None, "the backward runs on one device alone, not in `parallel`"
            total = sums.double() * shared.weight
            _add_up(shared.group, total, f"backward of {ctx.name!r}")
            passed, passed_away = (total / (shared.weight * count)).to(mean.dtype)
            scale = scale if weight is None else scale * weight.to(mean.dtype)
            of_values = (wide - passed.view(shape) - away * passed_away.view(shape)) * scale.view(shape)
            of_values = of_values.to(values.dtype)
        return of_values, of_weight, of_bias, None, None, None, None, None, None


def _add_up(group: ProcessGroup, rows: Tensor, what: str) -> None:
    """Replace rows by their sum over the ranks; `what` must be equal on all ranks."""
    group._reduce(flat_view(rows), "sum", f"the {what} (SyncBatchNorm), shape {tuple(rows.shape)}").wait()


def _others(values: Tensor) -> list[int]:
    return [dim for dim in range(values.dim()) if dim != 1]
