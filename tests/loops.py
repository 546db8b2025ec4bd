"""Models, replicas and a plain loop to compare with, for tests of user-written loops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.data_parallel.call import call_parts
from flowdp.data_parallel.cut import Arguments
from flowdp.data_parallel.join import join
from flowdp.data_parallel.layout import PLAIN, Callee
from flowdp.data_parallel.replicas import Link, Replicas
from flowdp.device.streams import HostLane, Lane

CPU = torch.device("cpu")


def mlp() -> nn.Sequential:
    """A perceptron of six inputs and three outputs, in float64; always the same."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def numbers(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@contextmanager
def replicas_of(
    module: nn.Module,
    count: int = 2,
    *,
    lanes: Sequence[Lane] | None = None,
    link: Link | None = None,
    repeats: bool = False,
) -> Iterator[Replicas]:
    """Replicas on CPU devices, or on those of the lanes, which are closed at the end."""
    places = lanes or [HostLane(CPU) for _ in range(count)]
    made = Replicas(module, places, [1] * len(places), repeats=repeats, link=link)
    try:
        yield made
    finally:
        made.close()


def called(replicas: Replicas, sizes: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """The joined outputs of the replicas for a batch, cut into parts of these sizes."""
    replicas.look()
    parts = Arguments(PLAIN, Callee(replicas.module.forward), args, kwargs).parts(sizes)
    made = call_parts(replicas, parts, lambda module, part: module(*part.args, **part.kwargs))
    return join(made, [part.samples for part in parts], PLAIN)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_equal(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    """Assert that two lists of tensors are equal up to rounding."""
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        if mine is None or other is None:
            assert mine is other
        else:
            torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)
