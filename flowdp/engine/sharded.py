"""A call that several devices do together, as one node of the caller's graph.

The node's inputs are the parameters of the user's module and the tensors of the call that ask for a gradient;
its outputs are those of the devices, joined. In between each device has a graph of its own, so that forward
and backward of all run at once, each in the thread of its rank. (A graph that spans CPU devices would be
walked by one thread.) The gradients come out of the node summed over the devices: whatever the caller does
with gradients, hooks included, sees what one device would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flowdp.device.transfer import carry, move
from flowdp.engine.peers import Peers
from flowdp.engine.scatter import Arguments, Joining, Outputs, Part, Returned

__all__ = [
    "Gradients",
    "Shard",
    "accumulate",
    "add_up",
    "call_sharded",
    "collect_gradients",
    "cut",
    "parts_of",
    "take_gradients",
]

Run = Callable[[nn.Module, Part], Any]
"""Calls a module with its part of the arguments."""

Gradients = list[Tensor | None]


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a call, and who does it.

    Attributes:
        rank: Whose it is.
        arguments: What it is a part of.
        start: Its first sample there.
        samples: How many it has.
    """

    rank: int
    arguments: Arguments
    start: int
    samples: int


def cut(arguments: Arguments, sizes: Sequence[int]) -> list[Shard]:
    """The shards of a call. Without samples there is nothing to divide: the first rank does it alone.

    Args:
        arguments: Of the call.
        sizes: Samples per rank. Shape (ranks,).
    """
    if not any(sizes):
        return [Shard(0, arguments, 0, 0)]
    return [Shard(rank, arguments, sum(sizes[:rank]), size) for rank, size in enumerate(sizes) if size]


def parts_of(calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], shards: Sequence[Shard]) -> list[Shard]:
    """The shards of a call that the user has cut: each has arguments of its own, which go whole.

    Args:
        calls: (args, kwargs) of each.
        shards: As flowdp would have cut it.
    """
    return [
        Shard(shard.rank, Arguments(args, kwargs, None), 0, shard.samples)
        for (args, kwargs), shard in zip(calls, shards, strict=True)
    ]


def call_sharded(
    peers: Peers, shards: Sequence[Shard], run: Run, joining: Joining | None = None, *, sync: bool = True
) -> Any:
    """Call the modules with their shards, all ranks at once, and join what they return.

    Args:
        peers: The modules.
        shards: In the order in which outputs are joined. A rank does its own one after another.
        run: Calls a module.
        joining: How the outputs are joined; None: along dim 0.
        sync: Whether backward sums the gradients over the ranks; else those of the replicas stay with them,
            for the next backward that does.

    Returns:
        The outputs, on the first device.

    Raises:
        FlowdpError: The outputs cannot be joined.

    Streams:
        As `Peers.each`, in forward and in backward.
    """
    peers.follow()
    call = _Call(peers, shards, run, joining or Joining(), sync)
    if not torch.is_grad_enabled():
        joined = call.forward()
        return joined.tree(joined.tensors)
    made: list[Outputs] = []
    wanting = [leaf for arguments in call.sources for leaf in arguments.wanting]
    tensors = _Node.apply(call, made, *peers.trained(0), *wanting)  # type: ignore[no-untyped-call]
    return made[0].tree(tensors)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, made: list[Outputs], *inputs: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        joined = call.forward()
        made.append(joined)
        ctx.call = call
        ctx.set_materialize_grads(False)
        asked = zip(joined.tensors, joined.differentiable, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, is_asked in asked if not is_asked))
        return tuple(joined.tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # The devices' graphs are kept for another backward where the caller's is.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return (None, None, *ctx.call.backward(gradients, keep))


class _Call:
    """One call, and the graphs of the devices."""

    def __init__(self, peers: Peers, shards: Sequence[Shard], run: Run, joining: Joining, sync: bool) -> None:
        self.sources = list({id(shard.arguments): shard.arguments for shard in shards}.values())
        self._peers = peers
        self._shards = shards
        self._run: Run | None = run
        self._joining = joining
        self._sync = sync
        self._modes = peers.modes()  # inside the node, autograd has switched gradients off
        ranks = range(len(peers.modules))
        self._places = [[p for p, shard in enumerate(shards) if shard.rank == rank] for rank in ranks]
        self._parameters = [peers.trained(rank) for rank in ranks]
        self._parts: dict[int, Part] = {}
        self._returned: dict[int, Returned] = {}
        self._joined: Outputs | None = None

    def forward(self) -> Outputs:
        pieces: dict[int, list[Tensor]] = {}
        for found in self._peers.each(self._jobs(self._forward), self._modes):
            pieces.update(found or {})
        places = range(len(self._shards))
        with torch.no_grad():
            self._joined = self._joining.join(
                [self._returned[p] for p in places], [pieces[p] for p in places]
            )
        return self._joined

    def backward(self, gradients: Sequence[Tensor | None], keep: bool) -> Gradients:
        if self._joined is None:
            raise RuntimeError(
                "backward a second time through a call that flowdp did: its graph is freed; give the first "
                "backward retain_graph=True"
            )
        do = partial(self._backward, self._joined, gradients, keep)
        with self._peers.backward(leaves=not self._sync and bool(self._places[0])):
            found = self._peers.each(self._jobs(do, with_left=self._sync))
        of_parts: dict[int, Gradients] = {}
        of_parameters: list[Gradients] = []
        for answer in found:
            if answer is not None:
                of_parameters.append(answer[0])
                of_parts.update(answer[1])
        wanted: Gradients = []
        for source in self.sources:
            places = [place for place, shard in enumerate(self._shards) if shard.arguments is source]
            samples = [self._shards[place].samples for place in places]
            wanted += source.join_gradients([of_parts[place] for place in places], samples)
        if not keep:  # a loss that the user keeps would keep the batch, too
            self._joined = None
            self._parts, self._returned = {}, {}
            self.sources, self._shards, self._run = [], (), None
        with self._peers.summing.running():
            summed = add_up(of_parameters)
        return [*summed, *wanted]

    def _jobs(self, do: Callable[[int], Any], *, with_left: bool = False) -> list[Callable[[], Any] | None]:
        return [
            partial(do, rank) if places or (with_left and self._peers.has_left(rank)) else None
            for rank, places in enumerate(self._places)
        ]

    def _forward(self, rank: int) -> dict[int, list[Tensor]]:
        peers = self._peers
        device = peers.devices[rank]
        assert self._run is not None
        peers.receive(rank)
        pieces: dict[int, list[Tensor]] = {}
        for place in self._places[rank]:
            shard = self._shards[place]
            part = shard.arguments.part(shard.start, shard.samples, device)
            peers.hold(rank, (part.args, part.kwargs))
            weights = self._joining.weigh(part)
            returned = Returned(self._run(peers.modules[rank], part), shard.samples, device)
            returned.weights = {name: move(weight, peers.devices[0]) for name, weight in weights.items()}
            self._parts[place], self._returned[place] = part, returned
            pieces[place] = carry([tensor.detach() for tensor in returned.tensors], peers.devices[0])
        return pieces

    def _backward(
        self, joined: Outputs, gradients: Sequence[Tensor | None], keep: bool, rank: int
    ) -> tuple[Gradients, dict[int, Gradients]]:
        parameters, places = self._parameters[rank], self._places[rank]
        roots: list[tuple[Tensor, Tensor]] = []
        for place in places:
            for tensor, gradient in zip(
                self._returned[place].tensors, joined.part(gradients, place), strict=True
            ):
                if gradient is not None and tensor.requires_grad:
                    roots.append((tensor, move(gradient, tensor.device)))
        wanting = [leaf for place in places for leaf in self._parts[place].wanting]
        leaves = [*parameters, *wanting]
        found: Gradients = [None] * len(leaves)
        outputs, seeds = _columns(roots)
        if roots and leaves and rank == 0:
            # Not accumulated: the caller's graph does that, with the sum, and runs the hooks on it.
            with _without_hooks(parameters):
                found = list(torch.autograd.grad(outputs, leaves, seeds, keep, allow_unused=True))
        elif roots and leaves:
            torch.autograd.backward(outputs, seeds, retain_graph=keep, inputs=leaves)
            found[len(parameters) :] = take_gradients(wanting)
        if rank and self._sync:
            found[: len(parameters)] = take_gradients(parameters)
        own = carry(found[: len(parameters)], self._peers.devices[0])
        rest = iter(found[len(parameters) :])
        return own, {place: [next(rest) for _ in self._parts[place].wanting] for place in places}


def take_gradients(tensors: Sequence[Tensor]) -> Gradients:
    """The gradients of leaves, taken away from them."""
    taken = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return taken


@torch.no_grad()
def add_up(ranks: Sequence[Gradients]) -> Gradients:
    """The sum over the ranks, in their order; None where no rank has a gradient.

    Args:
        ranks: Gradients of the same parameters, on one device. Shape (ranks, parameters). They stay as they
            are: autograd may share or expand them.
    """
    total = list(ranks[0])
    for gradients in ranks[1:]:
        both: list[tuple[int, Tensor, Tensor]] = []
        for place, (known, more) in enumerate(zip(total, gradients, strict=True)):
            if known is None:
                total[place] = more
            elif more is not None:
                both.append((place, known, more))
        if not both:
            continue
        sums = torch._foreach_add([known for _, known, _ in both], [more for _, _, more in both])
        for (place, _, _), summed in zip(both, sums, strict=True):
            total[place] = summed
    return total


def accumulate(parameters: Sequence[Tensor], ranks: Sequence[Gradients]) -> None:
    """Add gradients of all ranks to parameters, as a backward would: hooks see their sum.

    Args:
        parameters: Leaves.
        ranks: Gradients of each, on the same device. Shape (ranks, parameters).
    """
    sums = add_up(ranks) if ranks else []
    given = [(p, g) for p, g in zip(parameters, sums, strict=bool(sums)) if g is not None]
    if given:
        torch.autograd.backward(*_columns(given))


def collect_gradients(peers: Peers) -> None:
    """Add what backwards without a sum have left at the replicas to the user's module."""
    with peers.backward(leaves=False):
        ranks = range(len(peers.modules))
        jobs = [partial(_bring_home, peers, rank) if peers.has_left(rank) else None for rank in ranks]
        if any(jobs):
            accumulate(peers.trained(0), [found for found in peers.each(jobs) if found is not None])


def _bring_home(peers: Peers, rank: int) -> Gradients:
    return carry(take_gradients(peers.trained(rank)), peers.devices[0])


def _columns(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


@contextmanager
def _without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Hold back the hooks of tensors."""
    held = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)
