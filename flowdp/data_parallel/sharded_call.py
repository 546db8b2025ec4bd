"""A call that several devices do together, as one node of the caller's graph.

The node's inputs are the parameters of the user's module and the tensors of the call that ask for a gradient;
its outputs are those of the devices, joined. In between each device has a graph of its own, so that forward
and backward of all run at once, each in the thread of its rank. (A graph that spans CPU devices would be
walked by one thread.) The gradients come out of the node summed over the devices: whatever the caller does
with gradients, hooks included, sees the values of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from flowdp.collective.gradient_sum import Gradients, accumulate, add_up, added, take_gradients, without_hooks
from flowdp.data_parallel.gather import Joining, Outputs, PartOutputs
from flowdp.data_parallel.higher_order import RankGraph, differentiate, retains_graph
from flowdp.data_parallel.lost_gradients import check_graph_ends
from flowdp.data_parallel.nccl_transfer import Copying, Packed, Reducing
from flowdp.data_parallel.replicas import Replicas
from flowdp.data_parallel.scatter import Arguments, ArgumentTensor, CallArguments
from flowdp.device.copies import carry, move
from flowdp.errors import FlowdpError

__all__ = [
    "Shard",
    "call_sharded",
    "collect_gradients",
    "cut",
]

Run = Callable[[nn.Module, CallArguments], Any]
"""Calls a module with its part of the arguments."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a call: consecutive samples of its arguments."""

    rank: int
    arguments: Arguments
    start: int
    samples: int


def cut(
    arguments: Arguments,
    sizes: Sequence[int],
    split: Callable[[tuple[int, ...]], Sequence[tuple[tuple[Any, ...], dict[str, Any]]]] | None = None,
) -> list[Shard]:
    """The shards of a call. Without samples there is nothing to divide: the first rank does it alone.

    Args:
        arguments: Arguments of the call.
        sizes: Samples per rank. Shape (ranks,).
        split: Cuts instead: samples of each shard -> its own (args, kwargs), which go whole.
    """
    if not any(sizes):
        return [Shard(0, arguments, 0, 0)]
    shards = [Shard(rank, arguments, sum(sizes[:rank]), size) for rank, size in enumerate(sizes) if size]
    if split is None or len(shards) == 1:
        return shards
    calls = split(tuple(shard.samples for shard in shards))
    return [
        Shard(shard.rank, Arguments(args, kwargs, None), 0, shard.samples)
        for (args, kwargs), shard in zip(calls, shards, strict=True)
    ]


def call_sharded(
    replicas: Replicas,
    shards: Sequence[Shard],
    run: Run,
    joining: Joining | None = None,
    *,
    sync: bool = True,
    checks: bool = False,
) -> Any:
    """Call the modules with their shards, all ranks at once, and join their outputs.

    Args:
        replicas: The modules.
        shards: In the order in which outputs are joined. A rank does its own one after another.
        run: Calls a module.
        joining: Rules for joining the outputs; None: along dim 0.
        sync: Whether backward sums the gradients over the ranks; else those of the replicas stay with them,
            for the next backward that does.
        checks: Whether to look for gradients that would be lost.

    Returns:
        The outputs, on the first device.

    Raises:
        FlowdpError: The outputs cannot be joined, or a derivative would be lost.

    Streams:
        As `Replicas.each`, in forward and in backward.
    """
    replicas.follow()
    call = _Call(replicas, shards, run, joining or Joining(), sync, checks)
    if not torch.is_grad_enabled():
        joined = call.forward()
        return joined.tree(joined.tensors)
    made: list[Outputs] = []
    tensors = _Node.apply(call, made, *replicas.trained(0), *call.wanting())  # type: ignore[no-untyped-call]
    call.note_versions()
    return made[0].tree(tensors[: len(made[0].tensors)])


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, made: list[Outputs], *inputs: Tensor) -> tuple[Tensor, ...]:
        joined = call.forward()
        made.append(joined)
        ctx.call = call
        ctx.set_materialize_grads(False)
        asked = zip(joined.tensors, joined.differentiable, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, is_asked in asked if not is_asked))
        wanting = inputs[len(inputs) - len(call.wanting()) :]
        written = [wanting[place] for place in call.written]
        ctx.mark_dirty(*written)
        if not written:
            ctx.save_for_backward(*wanting)
        return (*joined.tensors, *written)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        demand = _demand(ctx.next_functions[: call.count])
        if torch.is_grad_enabled():
            return (None, None, *call.differentiate(gradients, ctx.saved_tensors, demand, retains_graph()))
        # The devices' graphs are kept for another backward where the caller's is.
        return (None, None, *call.backward(gradients, demand, retains_graph()))


@dataclass(frozen=True, slots=True)
class _Demand:
    """The gradients of a node that a backward asks for.

    Attributes:
        parameters: Whether it asks for those of parameters.
        accumulates: Whether they are added to the parameters' own, or only returned (`torch.autograd.grad`).
    """

    parameters: bool
    accumulates: bool


def _demand(edges: Sequence[tuple[Any, int]]) -> _Demand:
    for node, _ in edges:
        try:
            if torch._C._will_engine_execute_node(node):
                return _Demand(parameters=True, accumulates=True)
        except RuntimeError:  # torch's answer for a leaf that autograd.grad() was given
            return _Demand(parameters=True, accumulates=False)
    return _Demand(parameters=False, accumulates=False)


class _Call:
    """One call, and the graphs of the devices.

    Attributes:
        sources: The arguments, each once.
        count: Number of parameters that are trained.
        written: Places in `wanting()` of the tensors that the modules have written to.
    """

    def __init__(
        self,
        replicas: Replicas,
        shards: Sequence[Shard],
        run: Run,
        joining: Joining,
        sync: bool,
        checks: bool,
    ) -> None:
        self.sources = list({id(shard.arguments): shard.arguments for shard in shards}.values())
        self.written: list[int] = []
        self._replicas = replicas
        self._shards = shards
        self._run: Run | None = run
        self._joining = joining
        self._sync, self._checks = sync, checks
        self._modes = replicas.modes()  # inside the node, autograd has switched gradients off
        ranks = range(len(replicas.modules))
        self._places = [[p for p, shard in enumerate(shards) if shard.rank == rank] for rank in ranks]
        self._parameters = [replicas.trained(rank) for rank in ranks]
        self.count = len(self._parameters[0])
        self._parts: dict[int, CallArguments] = {}
        self._versions: dict[int, int] = {}  # of the caller's tensors, by identity
        self._returned: dict[int, PartOutputs] = {}
        self._joined: Outputs | None = None
        self._is_shared = False  # with graphs of its gradients

    def wanting(self) -> list[Tensor]:
        """The tensors of the caller that ask for a gradient."""
        return [leaf for arguments in self.sources for leaf in arguments.wanting]

    def forward(self) -> Outputs:
        pieces: dict[int, list[Tensor]] = {}
        for found in self._replicas.each(self._jobs(self._forward, self._places), self._modes, self._places):
            pieces.update(found or {})
        self._replicas.note()
        self._count_writes()
        places = range(len(self._shards))
        with torch.no_grad():
            self._joined = self._joining.join(
                [self._returned[p] for p in places], [pieces[p] for p in places]
            )
        return self._joined

    def backward(self, gradients: Sequence[Tensor | None], demand: _Demand, keep: bool) -> Gradients:
        joined = self._check_alive()
        sync = self._sync or not demand.accumulates
        is_summed = self._sync and demand.accumulates
        with self._replicas.backward(keeps=not sync and bool(self._places[0])):
            busy = self._busy(with_unsummed=is_summed)
            is_whole = is_summed and demand.parameters and all(busy)
            carrier = self._replicas.carrier(self._parameters[0], is_whole=is_whole)
            do = partial(self._backward, joined, gradients, demand, keep, carrier)
            found = self._replicas.each(self._jobs(do, busy), parts=self._places)
        of_parts: dict[int, Gradients] = {}
        of_parameters: list[Packed] = []
        for answer in found:
            if answer is not None:
                of_parameters.append(answer[0])
                of_parts.update(answer[1])
        wanted = self._join_wanting(of_parts)
        if not keep:
            self._free()
        with self._replicas.summing.running():
            summed = carrier.sum(of_parameters)
        return [*summed, *wanted]

    def differentiate(
        self, gradients: Sequence[Tensor | None], wanting: Sequence[Tensor], demand: _Demand, keep: bool
    ) -> Gradients:
        """Run `backward` with a graph of the gradients; they are summed in any case."""
        joined = self._check_alive()
        if self.written:
            raise FlowdpError(
                "create_graph=True cannot go through a call that wrote to an argument that requires grad: "
                "give it argument.clone()"
            )
        self._is_shared = True
        graphs: list[RankGraph | None] = []
        seeds: list[list[Tensor | None]] = []
        for rank, places in enumerate(self._places):
            graphs.append(self._graph(rank, wanting, demand) if places else None)
            seeds.append([one for place in places for one in joined.part(gradients, place)])
        with self._replicas.backward(keeps=False):
            found = differentiate(self._replicas, graphs, seeds)
            takes = self._sync and demand.accumulates
            left = _take_unsummed(self._replicas) if takes else []
        of_parts: dict[int, Gradients] = {}
        of_parameters: list[Gradients] = list(left)
        for rank, answer in enumerate(found):
            if answer is not None:
                rest = iter(answer)
                of_parameters.append([next(rest) for _ in range(self.count)])
                for place in self._places[rank]:
                    of_parts[place] = [next(rest) for _ in self._parts[place].wanting]
        wanted = self._join_wanting(of_parts)
        if not keep:
            self._free()
        return [*added(of_parameters), *wanted]

    def note_versions(self) -> None:
        """Remember the caller's tensors as they are: graphs may depend on their memory."""
        self._versions = {
            id(one.whole): one.whole._version
            for part in self._parts.values()
            for one in part.tensors
            if not one.is_copy and one.version is not None and not one.whole.is_inference()
        }

    def _graph(self, rank: int, wanting: Sequence[Tensor], demand: _Demand) -> RankGraph:
        """The graph of a rank, for the order that comes after it."""
        inputs, leaves = list(self._parameters[0]), list(self._parameters[rank])
        asked = self._asked(rank, demand)
        outputs: list[Tensor] = []
        for place in self._places[rank]:
            shard = self._shards[place]
            first = self._first_wanting(place)
            inputs += [
                shard.arguments.piece(k, wanting[first + k], shard.start, shard.samples)
                for k in range(len(shard.arguments.wanting))
            ]
            leaves += self._parts[place].wanting
            outputs += self._returned[place].tensors
        asked += [True] * (len(leaves) - len(asked))
        walking = partial(self._walking, rank)
        return RankGraph(tuple(inputs), tuple(leaves), tuple(outputs), tuple(asked), walking)

    def _asked(self, rank: int, demand: _Demand) -> list[bool]:
        """Whether each parameter of a rank gets a gradient: some may have been frozen since the call."""
        return [demand.parameters and tensor.requires_grad for tensor in self._parameters[rank]]

    def _join_wanting(self, of_parts: dict[int, Gradients]) -> Gradients:
        wanted: Gradients = []
        for source in self.sources:
            places = [place for place, shard in enumerate(self._shards) if shard.arguments is source]
            samples = [self._shards[place].samples for place in places]
            wanted += source.join_gradients([of_parts[place] for place in places], samples)
        return wanted

    def _check_alive(self) -> Outputs:
        if self._joined is None:
            raise RuntimeError(
                "backward a second time through a call that flowdp did: its graph is freed; give the first "
                "backward retain_graph=True"
            )
        return self._joined

    def _free(self) -> None:
        """Let go of the graphs: a loss that the user keeps would keep the batch, too."""
        self._joined = None
        self._parts, self._returned = {}, {}
        self.sources, self._shards, self._run = [], (), None

    @contextmanager
    def _walking(self, rank: int) -> Iterator[None]:
        """Context of a walk through a rank's graph.

        Hooks on the user's parameters are held back: the caller's graph runs them on the sums. And torch is
        told of writes since the call to memory on which the graph may depend.
        """
        self._replicas.count_writes(rank)
        versions = self._versions
        written = [
            one.given
            for place in self._places[rank]
            if place in self._parts  # else it is freed
            for one in self._parts[place].tensors
            if id(one.whole) in versions and one.whole._version != versions[id(one.whole)]
        ]
        torch.autograd.graph.increment_version(written)
        with without_hooks(self._parameters[rank]), _errors_explained():
            yield

    def _count_writes(self) -> None:
        """Count the devices' writes to the caller's tensors, as if one device had made them.

        Raises:
            FlowdpError: Several devices have written to one.
        """
        columns: dict[int, list[ArgumentTensor]] = {}
        for place in range(len(self._shards)):
            for one in self._parts[place].tensors:
                columns.setdefault(id(one.whole), []).append(one)
        wanting = {id(leaf): place for place, leaf in enumerate(self.wanting())}
        for key, column in columns.items():
            if not any(one.is_written for one in column):
                continue
            whole = column[0].whole
            if len(column) > 1 and not column[0].is_cut:
                raise FlowdpError(
                    f"the module wrote to an argument of shape {tuple(whole.shape)} that goes whole to all "
                    "devices, each of which would write to it: let it write to a copy, argument.clone()"
                )
            if key in wanting and column[0].leaf is not None:
                self.written.append(wanting[key])
            elif not whole.is_inference():
                torch.autograd.graph.increment_version([whole])

    def _busy(self, *, with_unsummed: bool) -> list[bool]:
        """Whether each rank has a part of the call, or gradients of earlier ones."""
        return [
            bool(places) or (with_unsummed and self._replicas.has_unsummed(rank))
            for rank, places in enumerate(self._places)
        ]

    def _jobs(self, do: Callable[[int], Any], busy: Sequence[object]) -> list[Callable[[], Any] | None]:
        return [partial(do, rank) if is_busy else None for rank, is_busy in enumerate(busy)]

    def _forward(self, rank: int) -> dict[int, list[Tensor]]:
        replicas = self._replicas
        device = replicas.devices[rank]
        assert self._run is not None
        replicas.receive(rank)
        pieces: dict[int, list[Tensor]] = {}
        for place in self._places[rank]:
            shard = self._shards[place]
            part = shard.arguments.part(shard.start, shard.samples, device)
            replicas.hold(rank, (part.args, part.kwargs))
            weights = self._joining.weigh(part)
            try:
                launch = partial(replicas.launch, rank, shard.samples, self._run)
                output = replicas.call(rank, shard.samples, launch, part)
            except Exception as error:
                given = shard.arguments.in_words(shard.start, shard.samples, self._joining.positional)
                error.add_note(f"flowdp: called with {given}")
                raise
            weights = {name: move(weight, replicas.devices[0]) for name, weight in weights.items()}
            returned = PartOutputs(output, shard.samples, device, weights)
            if self._checks:
                check_graph_ends(returned.tensors, part.wanting, self._parameters, rank)
            self._parts[place], self._returned[place] = part, returned
            bring_back(part, replicas.devices[0])
            pieces[place] = carry([tensor.detach() for tensor in returned.tensors], replicas.devices[0])
        return pieces

    def _backward(
        self,
        joined: Outputs,
        gradients: Sequence[Tensor | None],
        demand: _Demand,
        keep: bool,
        carrier: Copying | Reducing,
        rank: int,
    ) -> tuple[Packed, dict[int, Gradients]]:
        parameters, places = self._parameters[rank], self._places[rank]
        roots: list[tuple[Tensor, Tensor]] = []
        for place in places:
            of_outputs = joined.part(gradients[: len(joined.tensors)], place)
            pairs = [*zip(self._returned[place].tensors, of_outputs, strict=True)]
            pairs += self._written_pairs(gradients[len(joined.tensors) :], place)
            roots += [
                (tensor, move(gradient, tensor.device))
                for tensor, gradient in pairs
                if gradient is not None and tensor.requires_grad
            ]
        wanting = [leaf for place in places for leaf in self._parts[place].wanting]
        asked = [*self._asked(rank, demand), *[True] * len(wanting)]
        leaves = list(compress([*parameters, *wanting], asked))
        found: Gradients = [None] * len(asked)
        outputs, seeds = [tensor for tensor, _ in roots], [seed for _, seed in roots]
        # Where turns are taken, to free the graph node by node would be against the rank that launches.
        keep = keep or self._is_shared or self._replicas.frees_at_once(rank)
        with self._walking(rank):
            if not roots or not leaves:
                pass
            elif rank == 0 or not demand.accumulates:
                # Not accumulated: the caller's graph does that, with the sum.
                few = iter(torch.autograd.grad(outputs, leaves, seeds, keep, allow_unused=True))
                found = [next(few) if one else None for one in asked]
            else:
                torch.autograd.backward(outputs, seeds, retain_graph=keep, inputs=leaves)
                found[len(parameters) :] = take_gradients(wanting)
        if rank and self._sync and demand.accumulates:
            found[: len(parameters)] = take_gradients(parameters)
        own_gradients = carrier.pack(found[: len(parameters)], self._replicas.devices[rank])
        rest = iter(found[len(parameters) :])
        return own_gradients, {place: [next(rest) for _ in self._parts[place].wanting] for place in places}

    def _written_pairs(
        self, gradients: Sequence[Tensor | None], place: int
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The tensors that the module wrote to, in the graph of its part, and their gradients."""
        shard, first = self._shards[place], self._first_wanting(place)
        given = [one.given for one in self._parts[place].tensors if one.leaf is not None]
        return [
            (given[k], None if one is None else shard.arguments.piece(k, one, shard.start, shard.samples))
            for k, one in zip((k - first for k in self.written), gradients, strict=True)
            if 0 <= k < len(given)
        ]

    def _first_wanting(self, place: int) -> int:
        """Index in `wanting()` of the first tensor of a part."""
        before = self.sources[: self.sources.index(self._shards[place].arguments)]
        return sum(len(source.wanting) for source in before)


def bring_back(part: CallArguments, home: torch.device) -> None:
    """Copy a module's writes to its part on another device to the caller's memory."""
    for one in part.tensors:
        if one.is_written and one.is_copy and one.whole.device == home:
            with torch.no_grad():
                one.memory.copy_(one.given.detach(), non_blocking=True)


@contextmanager
def _errors_explained() -> Iterator[None]:
    """Remedies for errors of a walk through a graph."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise FlowdpError(
                "torch.utils.checkpoint inside a model of setup() needs use_reentrant=False: with True it "
                "starts a backward of its own, which cannot be told where to end"
            ) from None
        if "modified by an inplace operation" in str(error):
            error.add_note(
                "flowdp: a replica has one set of parameters at a time. Call backward before the optimizer "
                "steps and before a call with other parameters (torch.func.functional_call); where a graph "
                "needs several sets, as in MAML, call dp.module, on the first device alone"
            )
        raise


def collect_gradients(replicas: Replicas) -> None:
    """Add gradients that backwards without a sum have left at the replicas to the user's module."""
    replicas.check_unsummed()
    with replicas.backward(keeps=False):
        if found := _take_unsummed(replicas):
            accumulate(replicas.trained(0), add_up(found))


def _take_unsummed(replicas: Replicas) -> list[Gradients]:
    """Gradients that backwards without a sum have left at the replicas, removed from there."""
    ranks = range(len(replicas.modules))
    jobs = [partial(_bring_home, replicas, rank) if replicas.has_unsummed(rank) else None for rank in ranks]
    return [found for found in replicas.each(jobs) if found is not None] if any(jobs) else []


def _bring_home(replicas: Replicas, rank: int) -> Gradients:
    return carry(take_gradients(replicas.trained(rank)), replicas.devices[0])
