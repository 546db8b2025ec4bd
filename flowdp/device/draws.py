"""Random numbers of a rank on the CPU, from a generator of its own.

Torch has one CPU generator in a process. Ranks that draw from it at once take turns by chance, so that no two
runs have the same dropout. In this mode every random operation of a thread takes the generator of the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flowdp.errors import FlowdpError

__all__ = ["OwnDraws", "draw_seed"]


def draw_seed() -> int:
    """A seed from torch's CPU generator, which moves on by one number, as it does when a model draws from it.

    So `torch.manual_seed` and `torch.set_rng_state` have their effect on what the ranks draw.
    """
    return int(torch.randint(2**62, ()))


class OwnDraws(TorchDispatchMode):
    """While entered, random operations on the CPU draw from a generator seeded for one job of one rank.

    Args:
        seed: From `draw_seed`, the same for all ranks of a call; None: nothing may be drawn, for it is a
            backward.
        place: The rank, and what else the numbers depend on.

    Threads: the one that enters it.
    """

    def __init__(self, seed: int | None, *place: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator: torch.Generator | None = None
        if seed is not None:
            state = np.random.SeedSequence(seed, spawn_key=place).generate_state(1, np.uint64)
            self._generator = torch.Generator().manual_seed(int(state[0]) >> 1)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; a random one with the rank's generator."""
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or given.get("generator") is not None:
            return func(*args, **given)
        if self._generator is None or torch._C._current_graph_task_id() != -1:
            raise FlowdpError(
                f"{func} draws random numbers in a backward, as torch.utils.checkpoint does when it computes "
                "a forward again; with partition_ratios they would be others than in the forward: take the "
                "dropout out of the checkpointed part, or leave partition_ratios out"
            )
        seeded = _seeded(func)
        if seeded is None:
            raise FlowdpError(
                f"{func} takes no generator, so its numbers cannot be repeated with partition_ratios: draw "
                "them by another operation (torch.rand, tensor.normal_()), or leave partition_ratios out"
            )
        return seeded(*args, **{**given, "generator": self._generator})


@cache
def _seeded(func: Any) -> Any:
    """The form of an operation that takes a generator beside the same arguments; None where there is none."""
    if "generator" in _arguments(func):
        return func
    packet = func.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = _arguments(other)
        if arguments.pop("generator", None) is not None and arguments == _arguments(func):
            return other
    return None


def _arguments(func: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in func._schema.arguments}
