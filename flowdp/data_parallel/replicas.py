"""The user's module and its replicas on the other devices, a thread for each, for a loop the user owns.

Rank 0 is the user's own module. The others are kept like it: before a replica computes, it is sent the
changes of the user's module since its last job. So only the user's optimizer steps, and other writes to the
module (weight clipping, `load_state_dict`, an average of weights) reach all devices, too. Replicas on the CPU
use the memory of the user's parameters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from math import nan
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from flowdp.collective.batch_norm import SharedStatistics, taking_part
from flowdp.collective.local_group import group_lanes
from flowdp.collective.process_group import ProcessGroup
from flowdp.data.slots import keep_for
from flowdp.data.trees import tensors_of
from flowdp.data_parallel.lost_gradients import check_transforms
from flowdp.data_parallel.module_tensors import ModuleTensors
from flowdp.data_parallel.nccl_transfer import Copying, Link, NcclTransfer, Reducing, State, is_elsewhere
from flowdp.data_parallel.shared_memory import SharedMemory
from flowdp.data_parallel.stopwatch import Stopwatch
from flowdp.data_parallel.unseen_writes import UnseenWrites
from flowdp.device.compiled import FirstCalls, frees_at_once, warn_of_draws
from flowdp.device.copies import carry, copied
from flowdp.device.draws import NoRedraws, OwnDraws, draw_seed, share_generator
from flowdp.device.openmp import set_own_threads
from flowdp.device.streams import Lane
from flowdp.device.torch_modes import caller_modes, unhooked
from flowdp.errors import FlowdpError, OptionError
from flowdp.modules.attributes import Attributes
from flowdp.modules.copying import ReplicaFactory, make_replica
from flowdp.modules.hooks import Outside
from flowdp.policy.pool_size import PoolSize
from flowdp.policy.recheck import Recheck
from flowdp.replica.launch_turns import open_turns
from flowdp.threads.crew import Crew

__all__ = ["Replicas"]

log = logging.getLogger("flowdp")

T = TypeVar("T")
U = TypeVar("U")

Modes = Callable[[], AbstractContextManager[None]]


class Replicas:
    """One module per device, and threads that run them at once.

    Args:
        module: The user's, rank 0; on the first device.
        factory: Makes a replica for a device; None: copies of the module.
        lanes: One per rank. On CUDA the first device's work is done by the calling thread on its current
            stream, as in a loop without replicas.
        pools: Choose the size of the OpenMP pool of each rank's own thread. Shape (world_size,).
        repeats: Whether the draws of CPU ranks follow from the calling thread's generator.
        link: Opens NCCL; None: the ranks' threads copy.

    Attributes:
        modules: One per rank.
        devices: One per rank.
        watches: One per rank: times of its jobs on the device.
        summing: Times of the sums of gradients.
        pools: As given; updated where the watches are read.
        transfer: NCCL between the ranks; None without it.
        turns: Turns to launch; None where forwards meet.
        shares_generator: Flag per rank: it draws from a generator from which others draw, too.
        own_draws: Per rank, the generator of the job under way; None: the device's.

    Raises:
        OptionError: The module cannot be copied, or the replicas differ.
        CollectiveError: NCCL was asked for, and does not work here.

    Threads: one of the user's at a time.
    """

    def __init__(
        self,
        module: nn.Module,
        factory: ReplicaFactory | None,
        lanes: Sequence[Lane],
        pools: Sequence[PoolSize],
        *,
        repeats: bool = False,
        link: Link | None = None,
    ) -> None:
        self.devices = tuple(lane.device for lane in lanes)
        self.watches = tuple(Stopwatch(lane) for lane in lanes)
        self.summing = Stopwatch(lanes[0])
        self._lanes = tuple(lanes)
        self.pools = tuple(pools)
        self._repeats = repeats
        replicas = [make_replica(module, factory, lane) for lane in lanes[1:]]
        self.modules = (module, *replicas)
        self._tensors = [ModuleTensors(replica) for replica in self.modules]
        for table, device in zip(self._tensors[1:], self.devices[1:], strict=True):
            table.check_like(self._tensors[0], device)
        self._calls = [FirstCalls(replica) for replica in self.modules]
        if repeats:
            warn_of_draws(self.devices, self._calls[0].are_compiled)
        self._norms = [SharedStatistics(replica) for replica in self.modules]
        self.turns = open_turns(len(lanes), meets=bool(self._norms[0]))
        for norm, device in zip(self._norms, self.devices, strict=True):
            if len(norm) != len(self._norms[0]):
                raise OptionError(
                    f"the replica for {device} has {len(norm)} SyncBatchNorm layers and the model has "
                    f"{len(self._norms[0])}; replica(device) must convert it as the model is"
                )
        self._sharings = [
            SharedMemory(table, self._tensors[0])
            if rank and not lane.is_async and not lanes[0].is_async
            else None
            for rank, (table, lane) in enumerate(zip(self._tensors, lanes, strict=True))
        ]
        self._attributes = Attributes([table.modules for table in self._tensors])
        self._unseen = UnseenWrites(lanes[0]) if lanes[0].is_async else None
        self._kept = [False] * len(lanes)  # buffers that are the rank's own until the user's change
        self._ran: set[int] = set()
        self._now: list[State] = []
        self._due: list[list[int]] = []  # per rank, the tensors that it has to be sent
        self._sources: dict[int, Tensor] = {}
        self._sent: list[list[State]] = [[] for _ in lanes]
        self._unsummed_in: int | None = None  # the backward that left gradients at all ranks
        self._unsummed: dict[int, tuple[TensorWeakRef, int]] = {}  # the user's own behind it, and its version
        self._is_spoilt = False
        self._is_first_backward = len(lanes) > 1
        self.shares_generator = [not repeats and is_shared for is_shared in share_generator(self.devices)]
        self._redraws = [Recheck() for _ in lanes]
        self.own_draws: list[OwnDraws | None] = [None] * len(lanes)
        self._kinds = frozenset(device.type for device in self.devices)
        self._asked = [lane.event() for lane in lanes]
        self._done = [(lane.event(), lanes[0].event()) for lane in lanes]
        self._copying = Copying(self.devices[0])
        self.transfer = None if link is None else NcclTransfer.open(link, self._tensors, lanes)
        own_thread = not lanes[0].is_async
        names = [f"flowdp-replica-{rank}" if rank or own_thread else None for rank in range(len(lanes))]
        self._crew = Crew(names, partial(_around, self._lanes, self.pools))

    def on_first_rank(self, job: Callable[[], T]) -> T:
        """Run a job where the first rank's work is done, outside its stopwatch, in the caller's modes.

        Raises:
            BaseException: Raised by it.
        """
        modes = self.modes()

        def do() -> T:
            with unhooked(), modes():
                return job()

        (done, *_) = self._crew.run([do, *[None] * (len(self.modules) - 1)])
        return cast(T, done)

    @property
    def flags(self) -> tuple[bool, ...]:
        """Training mode of each submodule of the user's module."""
        return tuple(module.training for module in self._tensors[0].modules)

    def trained(self, rank: int) -> list[Tensor]:
        """The parameters that require grad on rank 0, as they are on a rank."""
        flags = [tensor.requires_grad for tensor in self._tensors[0].parameters]
        return list(compress(self._tensors[rank].parameters, flags))

    def buffers(self, rank: int) -> list[Tensor]:
        """The buffers of a rank, in the same order on all ranks."""
        return self._tensors[rank].buffers

    def follow(self) -> None:
        """Find the changes of the user's module before a call, for the replicas to receive.

        Raises:
            FlowdpError: It has other parts than before, or a derivative is asked for that would be lost.
        """
        check_transforms()
        self._crew.settle()
        if self._unsummed:
            self._drop_zeroed()
        self._tensors[0].check_as_it_was()
        self._attributes.look()
        self._attributes.send()
        self._ran.clear()
        for mine, *theirs in zip(*(table.modules for table in self._tensors), strict=True):
            for other in theirs:
                if other.training is not mine.training:
                    other.training = mine.training
                    self.forget()  # an average of weights may have been swapped in, by way of `.data`
        self._now = [_state(tensor) for tensor in self._tensors[0].tensors]
        if self._unseen is not None and self._unseen.look([now[:2] for now in self._now]):
            self._forget_sent()
        if self.transfer is not None:
            self.transfer.send(self._now)
        self._due = self._find_due()
        self._sources = {}
        copies: set[int] = set()
        first = len(self._tensors[0].parameters)
        for due, sharing in zip(self._due, self._sharings, strict=True):
            for i in due:
                # Tensors that the first rank's forward may write to while others still read are copied
                # before.
                if i >= first or (sharing is not None and not sharing.has(i)):
                    copies.add(i)
                elif sharing is None and i not in self._sources and not self._goes_by_nccl(i):
                    self._sources[i] = self._now[i][0].detach()
        if copies:
            with torch.no_grad():
                made = copied([self._now[i][0].detach() for i in sorted(copies)])
            self._sources.update(zip(sorted(copies), made, strict=True))

    def note(self) -> None:
        """Note the modules as the forward of a call has left them.

        Raises:
            FlowdpError: The forward changed the module in a way that the replicas cannot follow.
        """
        self._attributes.note(self._ran)
        for rank in self._ran:
            if (sharing := self._sharings[rank]) is not None:
                sharing.decide()

    def count_writes(self, rank: int) -> None:
        """Let torch find in a rank's graph the user's writes to parameters since the forward."""
        if (sharing := self._sharings[rank]) is not None:
            sharing.count_writes()

    def _find_due(self) -> list[list[int]]:
        """Per rank, the tensors that it has to be sent."""
        now, first = self._now, len(self._tensors[0].parameters)
        known: dict[int, list[int]] = {}  # of ranks that were last sent the same
        found: list[list[int]] = [[]]
        for sent, sharing, is_kept in zip(self._sent[1:], self._sharings[1:], self._kept[1:], strict=True):
            if not sent:
                found.append(list(range(len(now))))
            elif self._unseen is not None:
                if id(sent) not in known:
                    pairs = zip(now, sent, strict=True)
                    known[id(sent)] = [i for i, pair in enumerate(pairs) if _differs(*pair)]
                found.append(known[id(sent)])
            else:
                # Always, where the host has it: to compare takes longer than to copy, and a write to `.data`
                # is seen.
                shared = [sharing is not None and sharing.has(i) for i in range(first)]
                spared = [*shared, *[is_kept] * (len(now) - first)]
                columns = enumerate(zip(spared, now, sent, strict=True))
                found.append([i for i, (is_spared, *pair) in columns if not is_spared or _differs(*pair)])
        return found

    def _goes_by_nccl(self, index: int) -> bool:
        return self.transfer is not None and self.transfer.carries(index)

    def forget(self) -> None:
        """Send everything anew: something may have written to the user's module and left no trace."""
        self._forget_sent()
        if self._unseen is not None:
            self._unseen.forget()

    def _forget_sent(self) -> None:
        self._sent = [[] for _ in self._lanes]
        if self.transfer is not None:
            self.transfer.forget()

    def keep_buffers(self, samples: Sequence[int]) -> None:
        """Leave ranks the buffers that their last call made: count the user's, as they are, as sent.

        Args:
            samples: Per rank; one with 0 had no part in that call. Shape (world_size,).
        """
        buffers = [_state(buffer) for buffer in self._tensors[0].buffers]
        for rank, count in enumerate(samples):
            if rank and count:
                sent = self._sent[rank]
                self._sent[rank] = [*sent[: len(sent) - len(buffers)], *buffers]
                self._kept[rank] = True

    def has_unsummed(self, rank: int) -> bool:
        """Whether a replica has gradients of backwards without a sum."""
        return rank > 0 and any(tensor.grad is not None for tensor in self.trained(rank))

    def carrier(self, parameters: Sequence[Tensor], *, is_whole: bool) -> Copying | Reducing:
        """The transfer of gradients to the first device, where they are summed.

        Args:
            parameters: Parameters of the first rank.
            is_whole: Whether all ranks give gradients, which NCCL needs.
        """
        return self._copying if self.transfer is None or not is_whole else self.transfer.reducing(parameters)

    @contextmanager
    def backward(self, *, keeps: bool) -> Iterator[None]:
        """Context for a backward pass: drops stale replica gradients first.

        They are stale after an error, and where the user has dropped those of the module: `zero_grad()` knows
        nothing of replicas.

        Args:
            keeps: Whether the replicas keep their gradients, beside those of the user's module.
        """
        task = torch._C._current_graph_task_id()  # -1: not inside a backward of the caller's
        # Two calls in one graph: the user's own gradients come when both have been through.
        is_other = self._unsummed_in is not None and (task == -1 or task != self._unsummed_in)
        if self._is_spoilt or (is_other and all(tensor.grad is None for tensor in self.trained(0))):
            self.drop_gradients()
        elif is_other:
            self._drop_zeroed()
        if keeps:
            self._unsummed_in = task
            if task != -1:  # the user's own gradients come at its end
                torch.autograd.Variable._execution_engine.queue_callback(self._note_unsummed)
        try:
            if self._attributes.is_live:  # a checkpoint in the module calls its parts again
                self._attributes.look()
            outside = Outside(self.modules[0], backward=True) if self._is_first_backward else None
            if outside:
                outside.note()
            yield
            self._is_first_backward = False
            if outside and (changed := outside.changes()):
                log.warning(
                    "the hook %s keeps results in an object of the loop: it is called once by each device, "
                    "with gradients of its part of the batch",
                    ", the hook ".join(changed),
                )
            if self._attributes.is_live:
                self._attributes.note(set(range(len(self.modules))))
            if keeps and task == -1:
                self._note_unsummed()
        except BaseException:
            self._is_spoilt = True
            raise

    def check_unsummed(self) -> None:
        """Check that the user's gradients are as they were when those of the replicas were left there.

        Raises:
            FlowdpError: They have been written to, by clipping or scaling for instance.
        """
        self._drop_zeroed()
        for index, _ in self._written():
            raise FlowdpError(
                f"the gradient of {self._tensors[0].names[index]!r} has been written to (clipped or scaled) "
                "while no_sync() had left those of the other devices there: let the last backward be outside "
                "no_sync(), or clip by clip_grad_norm_() of what setup() returned"
            )

    def _note_unsummed(self) -> None:
        own = ((index, tensor.grad) for index, tensor in enumerate(self._tensors[0].parameters))
        self._unsummed = {
            index: (TensorWeakRef(grad), grad._version) for index, grad in own if grad is not None
        }

    def _written(self) -> Iterator[tuple[int, Tensor | None]]:
        """The user's gradients that are not as left beside those of the replicas, with their index."""
        for index, (left, version) in self._unsummed.items():
            grad = self._tensors[0].parameters[index].grad
            is_other = grad is None or grad is not left() or grad._version != version
            if is_other and any(table.parameters[index].grad is not None for table in self._tensors[1:]):
                yield index, grad

    def _drop_zeroed(self) -> None:
        """Drop the replicas' gradients where the user's own was dropped or zeroed."""
        for index, grad in self._written():
            if grad is None or (grad.layout is torch.strided and not grad.any()):
                for table in self._tensors[1:]:
                    table.parameters[index].grad = None

    def drop_gradients(self) -> None:
        """Forget the gradients at the replicas."""
        self._crew.settle()
        for table in self._tensors[1:]:
            for parameter in table.parameters:
                parameter.grad = None
        self._unsummed_in, self._is_spoilt = None, False
        self._unsummed = {}

    def modes(self) -> Modes:
        """The calling thread's grad, autocast and inference modes, for `each`."""
        return caller_modes(self._kinds)

    def each(
        self,
        jobs: Sequence[Callable[[], T] | None],
        modes: Modes | None = None,
        parts: Sequence[Sequence[object]] = (),
        *,
        enters_draws: bool = True,
    ) -> list[T | None]:
        """Run a job on every rank at once.

        Args:
            jobs: One per rank; None: nothing to do there.
            modes: Torch modes of the jobs; None: the caller's.
            parts: Parts of one batch, per rank: ranks that have one take the statistics of SyncBatchNorm
                together. Empty: none does.
            enters_draws: Whether repeatable draws are set up for the jobs. False: each does so by
                `own_draws`, for the mode holds the lock at each operation.

        Raises:
            BaseException: Raised by the first of them, with a note that names rank and device.

        Streams:
            The ranks' work comes after the caller's work on its current streams of all devices,
            and the caller's later work there comes after it. The host does not wait for devices.
        """
        home, *others = self._lanes
        here = [lane.current() for lane in self._lanes]
        for asked, stream in zip(self._asked, here, strict=True):
            asked.record(stream)
        for rank, lane in enumerate(others, 1):
            lane.compute.wait_event(self._asked[rank])
            lane.compute.wait_event(self._asked[0])
            home.aside(rank).wait_event(self._asked[0])
        entered = modes or self.modes()
        groups = self._groups(parts)
        is_backward = torch._C._current_graph_task_id() != -1
        seed = draw_seed() if self._repeats and not is_backward else None
        draws = [self._draws(rank, seed, is_backward=is_backward) for rank in range(len(jobs))]
        self.own_draws = [one if isinstance(one, OwnDraws) else None for one in draws]
        if not enters_draws:
            draws = [nullcontext()] * len(jobs)
        try:
            return self._crew.run(
                [
                    None
                    if job is None
                    else partial(self._do, rank, job, entered, groups.get(rank), draws[rank])
                    for rank, job in enumerate(jobs)
                ]
            )
        except BaseException:
            for group in groups.values():  # a job that never began is waited for, else
                group.abort("the call was given up")
            raise
        finally:  # after an error, too: the replicas may be reading tensors that the caller now changes
            for rank, lane in enumerate(others, 1):
                computed, carried = self._done[rank]
                computed.record(lane.compute)
                carried.record(home.aside(rank))
                here[rank].wait_event(computed)
                here[0].wait_event(computed)
                here[0].wait_event(carried)

    def call(self, rank: int, samples: int, run: Callable[[nn.Module, U], T], given: U) -> T:
        """Run a replica with so many samples, part of its job; other ranks reuse its compilation."""
        with nullcontext() if self._norms[0] else self._calls[rank].turn(samples):
            return run(self.modules[rank], given)

    def launch(self, rank: int, samples: int, forward: Callable[..., T], *args: Any) -> T:
        """Call a forward of so many samples, part of a rank's job, in turn, where ranks take turns to launch.

        The backward behind it needs no turn.
        """
        if self.turns is None:
            return forward(*args)
        return self.turns.ranks[rank].launch_forward(samples, forward, *args)

    def frees_at_once(self, rank: int) -> bool:
        """Whether the backward of a rank keeps its graph, which is then freed as a whole."""
        is_limited = self.turns is not None and self.turns.limit is not None
        return is_limited and frees_at_once(self.devices[rank])

    def receive(self, rank: int) -> None:
        """Copy the changes that `follow` saw to a replica; part of its job, before it computes."""
        self._ran.add(rank)
        if rank == 0:
            return
        before, sharing, mine = self._sent[rank], self._sharings[rank], self._tensors[rank]
        tensors = mine.tensors
        changed: list[int] = []
        for i in self._due[rank]:
            now = self._now[i]
            if not before or is_elsewhere(now, before[i]):
                tensors[i] = mine.fit(i, now[0])
                if sharing is not None and sharing.has(i):
                    sharing.attach(i)
            if tensors[i].requires_grad is not now[3]:
                tensors[i].requires_grad_(now[3])
            if not ((sharing is not None and sharing.has(i)) or self._goes_by_nccl(i)):
                changed.append(i)
        if changed:
            targets = [tensors[i] for i in changed]
            # One that has ceased to be shared is not among the sources.
            sources = [self._sources[i] if i in self._sources else self._now[i][0].detach() for i in changed]
            sources = carry(sources, self.devices[rank])
            # A buffer that an inference made anew can be written in another one alone.
            with torch.inference_mode(any(target.is_inference() for target in targets)), torch.no_grad():
                torch._foreach_copy_(targets, sources)
        self._sent[rank] = self._now
        self._kept[rank] = False
        if sharing is not None:
            versions = [now[1] for now in self._now[: len(mine.parameters)]]
            sharing.begin(versions, is_training=self.modules[0].training)

    def hold(self, rank: int, tree: Any) -> None:
        """Tell the allocator that a rank reads the caller's tensors, where it does so on the same device.

        The rank's thread may be the last to let them go, while the device has yet to read them.
        """
        lane = self._lanes[rank]
        if rank and lane.is_async and lane.device == self.devices[0]:
            keep_for(lane.compute, list(tensors_of(tree)))

    def close(self) -> None:
        """End the threads, and give NCCL back."""
        self._crew.close()
        if self.transfer is not None:
            self.transfer.close()

    def _groups(self, parts: Sequence[Sequence[object]]) -> dict[int, ProcessGroup]:
        """A group of the ranks that have a part, by rank, for one forward or backward."""
        ranks = [rank for rank, own in enumerate(parts) if own]
        if not self._norms[0] or len(ranks) < 2:
            return {}
        lanes = [self._lanes[rank] for rank in ranks]
        return dict(zip(ranks, group_lanes(lanes, threading.TIMEOUT_MAX), strict=True))

    def watch(self, rank: int) -> AbstractContextManager[object]:
        """Occasional check of a rank's backward for repeated draws of the forward."""
        return self._watched(rank) if self.shares_generator[rank] else nullcontext()

    @contextmanager
    def _watched(self, rank: int) -> Iterator[None]:
        with NoRedraws(self.devices[rank]) if self._redraws[rank].is_due else nullcontext():
            yield
        self._redraws[rank].passed()

    def _draws(self, rank: int, seed: int | None, *, is_backward: bool) -> AbstractContextManager[object]:
        if self._repeats and self.devices[rank].type == "cpu":
            return OwnDraws(seed, rank)
        return self.watch(rank) if is_backward else nullcontext()

    def _do(
        self,
        rank: int,
        job: Callable[[], T],
        modes: Modes,
        group: ProcessGroup | None,
        draws: AbstractContextManager[object],
    ) -> T:
        try:
            if not self.pools[rank].is_fixed:
                set_own_threads(self.pools[rank].size)
            with (
                unhooked(),
                modes(),
                self.watches[rank].running(),
                taking_part(self._norms[rank], group),
                draws,
            ):
                return job()
        except Exception as error:
            if rank or len(self.modules) > 1:
                error.add_note(f"flowdp: on rank {rank}, {self.devices[rank]}")
            raise


@contextmanager
def _around(lanes: Sequence[Lane], pools: Sequence[PoolSize], rank: int) -> Iterator[None]:
    """Context of a rank's thread."""
    if lanes[rank].device.type == "cpu":
        set_own_threads(pools[rank].size)
    # Copies between the first device and this one are put on streams of both.
    aside = lanes[0].on(lanes[0].aside(rank)) if rank else nullcontext()
    # Backward runs in this thread, not in autograd's one per device.
    with aside, lanes[rank].on(lanes[rank].compute), torch.autograd.set_multithreading_enabled(False):
        yield


def _state(tensor: Tensor) -> State:
    # An inference tensor has no version, so it always differs, as NaN does from itself.
    version = nan if tensor.is_inference() else tensor._version
    address = tensor.data_ptr() if tensor.layout is torch.strided else 0  # `tensor.data = ...` moves it
    return tensor, version, address, tensor.requires_grad


def _differs(now: State, then: State) -> bool:
    return now[1] != then[1] or now[3] is not then[3] or is_elsewhere(now, then)
