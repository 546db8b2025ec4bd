"""The user's module and its replicas on the other devices, a thread for each, for a loop the user owns.

Rank 0 is the user's own module. The other ranks have shallow replicas of it, renewed before each call. So
only the user's optimizer steps, and whatever the loop does to the module has its effect on all devices.

Ranks on the CPU use the user's own parameters. Ranks on other devices have copies of them, which are sent
anew before each call. Buffers are copied for each call, for a forward may write to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flowdp.collective.batch_norm import SharedStatistics, call_groups, taking_part
from flowdp.collective.mean import add_weighted
from flowdp.collective.nccl_loop import NcclLoop, row_sizes
from flowdp.collective.process_group import ProcessGroup
from flowdp.data.moving import keep_for
from flowdp.data_parallel.gradient_sum import GradientSum
from flowdp.device.compiled import FirstCalls, warn_of_draws
from flowdp.device.copies import carry
from flowdp.device.cores import set_own_threads
from flowdp.device.draws import OwnDraws, SeededCalls, draw_seed, share_generator
from flowdp.device.stopwatch import Stopwatch
from flowdp.device.streams import Lane, Stream
from flowdp.device.torch_modes import caller_modes, unhooked
from flowdp.device.trees import tensors_of
from flowdp.modules.comparison import still
from flowdp.modules.shallow import ShallowReplicas
from flowdp.policy.efficiency import Activity
from flowdp.policy.schedule import Recheck
from flowdp.threads.crew import Crew

__all__ = ["Link", "Modes", "Replicas", "StandIns", "device_copies"]

T = TypeVar("T")
U = TypeVar("U")

Link = Callable[[Sequence[Lane], Mapping[torch.dtype, int]], NcclLoop | None]
"""Opens NCCL for rows of these sizes; None: it is not used."""

Modes = Callable[[], AbstractContextManager[None]]

StandIns = Mapping[int, Tensor]
"""Tensors that stand for a module's own, by the identity of those; those that require grad are leaves."""


class StreamOrder:
    """Order between the caller's current streams of all devices and those of the ranks.

    Args:
        lanes: One per rank.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self._asked = [lane.event() for lane in lanes]
        self._done = [(lane.event(), lanes[0].event()) for lane in lanes]

    def begin(self) -> list[Stream]:
        """Let the ranks' work come after the caller's; returns the caller's streams."""
        home, *others = self._lanes
        here = [lane.current() for lane in self._lanes]
        for asked, stream in zip(self._asked, here, strict=True):
            asked.record(stream)
        for rank, lane in enumerate(others, 1):
            lane.compute.wait_event(self._asked[rank])
            lane.compute.wait_event(self._asked[0])
            home.aside(rank).wait_event(self._asked[0])
        return here

    def end(self, here: Sequence[Stream]) -> None:
        """Let the caller's later work come after the ranks'; `here` is what `begin` returned."""
        home, *others = self._lanes
        for rank, lane in enumerate(others, 1):
            computed, carried = self._done[rank]
            computed.record(lane.compute)
            carried.record(home.aside(rank))
            here[rank].wait_event(computed)
            here[0].wait_event(computed)
            here[0].wait_event(carried)


class Draws:
    """Random numbers of the ranks' jobs.

    Args:
        devices: One per rank.
        calls: First calls of each rank, which say whether a module is compiled.
        repeats: Whether the draws of CPU ranks follow from the calling thread's generator.
    """

    def __init__(
        self, devices: Sequence[torch.device], calls: Sequence[FirstCalls], *, repeats: bool
    ) -> None:
        if repeats:
            warn_of_draws(devices, calls[0].are_compiled)
        self._devices = devices
        self._calls = calls
        self._repeats = repeats
        self._shares_generator = share_generator(devices)
        self._redraws = [Recheck() for _ in devices]

    def seed(self, *, walks: bool) -> int | None:
        """The seed of the jobs of all ranks, drawn by the calling thread; None: they have none in common."""
        return draw_seed() if self._repeats and not walks else None

    @contextmanager
    def of(self, rank: int, seed: int | None, *, walks: bool) -> Iterator[None]:
        """Context of a rank's job; a look for draws of a forward that is repeated comes back now and then."""
        looks = walks and self._redraws[rank].is_due
        context: AbstractContextManager[object] = nullcontext()
        if self._repeats and self._devices[rank].type == "cpu":
            draws = OwnDraws(seed, rank)
            if looks or (self._calls[rank].are_compiled and seed is not None):
                context = draws
            elif seed is not None:
                context = SeededCalls(draws)
        elif looks and self._shares_generator[rank]:
            context = OwnDraws()
        with context:
            yield
        if walks:
            self._redraws[rank].passed()


class Replicas:
    """One module per device, and threads that run them at once.

    Args:
        module: The user's, rank 0; on the first device.
        lanes: One per rank. On CUDA the first device's work is done by the calling thread on its current
            stream, as in a loop without replicas.
        threads: Threads that compute for each rank, where it is on the CPU. Shape (world_size,).
        repeats: Whether the draws of CPU ranks follow from the calling thread's generator.
        link: Opens NCCL; None: the ranks' threads copy.
        keeps: Whether the stopwatches keep the spans of what they time, for a timeline.

    Attributes:
        modules: One per rank, the user's first; those of other ranks are renewed by `follow`.
        devices: One per rank.
        watches: One per rank: times of its jobs on the device.
        summing: Times of the sums of gradients.
        turn: Held by a call from its first look at the module to its last, for threads take turns.

    Raises:
        CollectiveError: NCCL was asked for, and does not work here.

    Threads: the one that holds `turn`.
    """

    def __init__(
        self,
        module: nn.Module,
        lanes: Sequence[Lane],
        threads: Sequence[int],
        *,
        repeats: bool = False,
        link: Link | None = None,
        keeps: bool = False,
    ) -> None:
        self.devices = tuple(lane.device for lane in lanes)
        self.watches = tuple(Stopwatch(lane, keeps=keeps) for lane in lanes)
        self.summing = Stopwatch(lanes[0], keeps=keeps)
        self.turn = threading.RLock()
        self._lanes = tuple(lanes)
        self._shallow = ShallowReplicas(module, len(lanes))
        self._shallow.look()
        self._tensors: list[list[Tensor]] = []
        self._sends = any(lane.is_async for lane in lanes)
        self._nccl: NcclLoop | None = None
        if self._sends and link is not None:
            sizes = row_sizes([tensor for tensor in self.parameters() if tensor.requires_grad])
            self._nccl = link(lanes, sizes) if sizes else None
        self.modules: tuple[nn.Module, ...] = (module,)
        self.follow()
        self._norms = [SharedStatistics(replica) for replica in self.modules]
        self._calls = [FirstCalls(module) for _ in lanes]
        self._draws = Draws(self.devices, self._calls, repeats=repeats)
        self._kinds = frozenset(device.type for device in self.devices)
        self._order = StreamOrder(lanes)
        own_thread = not lanes[0].is_async
        names = [f"flowdp-replica-{rank}" if rank or own_thread else None for rank in range(len(lanes))]
        self._crew = Crew(names, partial(_around, self._lanes, threads))

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self.modules[0]

    # ------------------------------------------------------------------ tensors
    def parameters(self) -> list[Tensor]:
        """The parameters in the tables of the user's module, each once."""
        return _each_once(part._parameters for part in self._shallow.parts)

    def buffers(self) -> list[Tensor]:
        """The buffers there, each once."""
        return _each_once(part._buffers for part in self._shallow.parts)

    def trained(self, rank: int = 0) -> list[Tensor]:
        """The tensors of the module that require grad, as they are on a rank since `follow`."""
        return self._tensors[rank]

    def wanted(self) -> list[Tensor]:
        """The tensors of the module that require grad."""
        return [tensor for tensor in (*self.parameters(), *self.buffers()) if tensor.requires_grad]

    def follow(self) -> None:
        """Renew the replicas: they are like the user's module as it is now.

        Streams:
            Tensors are sent on the caller's current ones of all devices.
        """
        now = self.parameters()
        count = len(now)
        now += self.buffers()
        kept = [number for number, tensor in enumerate(now) if number < count or tensor.requires_grad]
        written = [number for number in range(count, len(now)) if not now[number].requires_grad]
        columns: Sequence[Sequence[Tensor]] = ()
        if self._sends:
            columns = device_copies([now[number] for number in kept], self._lanes, self._nccl)
        modules, self._tensors = [self.module], []
        for rank in range(len(self._lanes)):
            column = list(now)
            if rank and self._sends:
                for number, tensor in zip(kept, columns[rank - 1], strict=True):
                    column[number] = tensor
            self._tensors.append([column[k] for k, tensor in enumerate(now) if tensor.requires_grad])
            if rank == 0:
                continue
            fresh = _fresh([now[number] for number in written], self.devices[rank])
            for number, tensor in zip(written, fresh, strict=True):
                column[number] = tensor
            instead = dict(zip(map(id, now), column, strict=True))
            modules.append(self._shallow.renew(rank, instead, partial(self._copy, self.devices[rank])))
        self.modules = tuple(modules)

    def isolated(self, rank: int, standing: StandIns) -> nn.Module:
        """A replica on the first device that leaves no trace in the module, and draws nothing of batch norms.

        Its attributes, containers and buffers are its own; the other replicas are to be renewed behind it.

        Args:
            rank: Rank whose replica it is.
            standing: Tensors of that device in the place of all parameters and buffers.
        """
        home = self.devices[0]
        buffers = [tensor for tensor in self.buffers() if not tensor.requires_grad]
        fresh = _fresh([standing[id(tensor)] for tensor in buffers], home)
        instead = {**standing, **dict(zip(map(id, buffers), fresh, strict=True))}
        module = self._shallow.renew(rank, instead, partial(self._copy, home))
        still(module)
        return module

    def _copy(self, device: torch.device, tensor: Tensor) -> Tensor:
        """A copy of a plain tensor of the module for a rank's device; where it lies if not on the first."""
        return tensor.to(device, copy=True) if tensor.device == self.devices[0] else tensor.clone()

    @contextmanager
    def standing_in(self, instead: Mapping[int, Tensor]) -> Iterator[None]:
        """Context in which other tensors stand in the tables of the user's module.

        Args:
            instead: By the identity of the module's own.
        """
        parts = self._shallow.parts
        tables: list[dict[str, Any]] = [
            table for part in parts for table in (part._parameters, part._buffers)
        ]
        held = [(table, *item) for table in tables for item in table.items() if id(item[1]) in instead]
        for table, name, tensor in held:
            table[name] = instead[id(tensor)]
        try:
            yield
        finally:
            for table, name, tensor in held:
                if table.get(name) is instead[id(tensor)]:
                    table[name] = tensor

    @torch.no_grad()
    def average_buffers(self, samples: Sequence[int]) -> None:
        """Replace the buffers of the user's module by those of all ranks together, after a call.

        Float and complex buffers: the mean weighted by samples, in float64; integers and flags: the maximum.

        Args:
            samples: Per rank; one with 0 gives nothing. Shape (world_size,).

        Streams:
            The caller's current ones, which come after the ranks' work.
        """
        givers = [rank for rank, count in enumerate(samples) if count]
        shares = [samples[rank] / sum(samples) for rank in givers]
        own_tables = [part._buffers for part in self._shallow.parts]
        tables = [self._shallow.tables(rank) if rank else own_tables for rank in givers]
        for mine, *others in zip(*tables, strict=True):
            for name, buffer in mine.items():
                column = [buffer, *(table.get(name) for table in others)]
                if buffer is None or any(tensor is None or tensor.shape != buffer.shape for tensor in column):
                    continue
                column = carry(column, buffer.device)
                if all(torch.equal(tensor, buffer) for tensor in column):
                    continue  # a graph may have saved what nobody has written to
                if buffer.is_floating_point() or buffer.is_complex():
                    mean = buffer.to(torch.complex128 if buffer.is_complex() else torch.float64, copy=True)
                    add_weighted(mean, column[1:], shares)
                else:
                    mean = torch.stack(column).amax(0)
                buffer.data.copy_(mean)  # uncounted, as a batch norm's own writes are

    @property
    def flags(self) -> tuple[bool, ...]:
        """Training mode of each part of the user's module."""
        return tuple(part.training for part in self._shallow.parts)

    def hook(self) -> str | None:
        """The first hook of a part of the user's module that is none of torch's own; None without one."""
        for part, hook in self._shallow.hooks():
            owner = hook if hasattr(hook, "__qualname__") else type(hook)
            if not str(getattr(owner, "__module__", "")).startswith("torch.nn.utils."):
                return f"{getattr(owner, '__qualname__', owner)} of {type(part).__name__}"
        return None

    def gradient_sum(self, tensors: Sequence[Tensor], *, is_whole: bool) -> GradientSum:
        """The sum of the gradients of the first rank's tensors, on the first device.

        Args:
            tensors: As `trained` has given them.
            is_whole: Whether all ranks give gradients, which NCCL needs.
        """
        return GradientSum(tensors, self.devices[0], self._nccl if is_whole else None)

    # ------------------------------------------------------------------ work
    def modes(self) -> Modes:
        """The calling thread's modes, for `each`."""
        return caller_modes(self._kinds)

    def each(
        self,
        jobs: Sequence[Callable[[], T] | None],
        modes: Modes | None = None,
        *,
        walks: bool = False,
        activity: Activity = Activity.FORWARD,
    ) -> list[T | None]:
        """Run a job on every rank at once, each in a copy of the caller's context (`contextvars`).

        Ranks that have a job take the statistics of SyncBatchNorm together.

        Args:
            jobs: One per rank; None: nothing to do there.
            modes: Torch modes of the jobs; None: the caller's.
            walks: Whether the jobs walk graphs, and are no forwards, which may draw random numbers.
            activity: Their name in a timeline.

        Raises:
            BaseException: Raised by the first of them, with a note that names rank and device.

        Streams:
            The ranks' work comes after the caller's work on its current streams of all devices,
            and the caller's later work there comes after it. The host does not wait for devices.
        """
        here = self._order.begin()
        entered = modes or self.modes()
        parts = [rank for rank, job in enumerate(jobs) if job is not None]
        seed = self._draws.seed(walks=walks)
        handed: list[Callable[[], T] | None] = [None] * len(jobs)
        try:
            with call_groups(self._lanes, parts if self._norms[0] else ()) as groups:
                for rank, job in enumerate(jobs):
                    if job is not None:
                        context = self._draws.of(rank, seed, walks=walks)
                        do = partial(self._do, rank, job, activity, entered, groups.get(rank), context)
                        handed[rank] = partial(copy_context().run, do)
                return self._crew.run(handed)
        finally:  # after an error, too: the replicas may be reading tensors that the caller now changes
            self._order.end(here)

    def elsewhere(self, job: Callable[[], None]) -> None:
        """Do a job in the first rank's thread, under the caller's context and modes."""
        modes = self.modes()

        def do() -> None:
            with unhooked(), modes():
                job()

        self._crew.run([partial(copy_context().run, do), *[None] * (len(self.modules) - 1)])

    def call(self, rank: int, samples: int, run: Callable[[nn.Module, U], T], given: U) -> T:
        """Run a replica with so many samples, part of its job; other ranks reuse its compilation."""
        lane = self._lanes[rank]
        if rank and lane.is_async and lane.device == self.devices[0]:
            # The rank's thread may be the last to let them go, while the device has yet to read them.
            keep_for(lane.compute, list(tensors_of(given)))
        with nullcontext() if self._norms[0] else self._calls[rank].turn(samples):
            return run(self.modules[rank], given)

    def look(self) -> None:
        """Look at the user's module before a call, when the jobs of an interrupted one have ended.

        Raises:
            RuntimeError: The threads have been ended, or are those of another process.
        """
        self._crew.settle()
        self._shallow.look()

    def close(self) -> None:
        """End the threads, and give NCCL back."""
        self._crew.close()
        if self._nccl is not None:
            self._nccl.close()

    def walking(self, rank: int) -> AbstractContextManager[object]:
        """Context of a walk of graphs inside a job that does other things, too."""
        return self._draws.of(rank, None, walks=True)

    def _do(
        self,
        rank: int,
        job: Callable[[], T],
        activity: Activity,
        modes: Modes,
        group: ProcessGroup | None,
        draws: AbstractContextManager[object],
    ) -> T:
        try:
            with (
                unhooked(),
                modes(),
                self.watches[rank].running(activity),
                taking_part(self._norms[rank], group),
                draws,
            ):
                return job()
        except Exception as error:
            error.add_note(f"flowdp: on rank {rank}, {self.devices[rank]}")
            raise


@contextmanager
def _around(lanes: Sequence[Lane], threads: Sequence[int], rank: int) -> Iterator[None]:
    """Context of a rank's thread."""
    with ExitStack() as stack:
        if lanes[rank].device.type == "cpu":
            set_own_threads(threads[rank])
        if rank:
            # Copies between the first device and this one are put on streams of both.
            stack.enter_context(lanes[0].on(lanes[0].aside(rank)))
        stack.enter_context(lanes[rank].on(lanes[rank].compute))
        # Backward runs in this thread, not in autograd's one per device.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


def device_copies(
    parameters: Sequence[Tensor], lanes: Sequence[Lane], nccl: NcclLoop | None
) -> list[list[Tensor]]:
    """Copies of a module's parameters for a call, leaves that require grad where those do.

    They are new for each call, so no later call writes to what a graph may have saved.

    Args:
        parameters: On the first rank's device.
        lanes: One per rank.
        nccl: Sends them in rows, by one broadcast; None: they are copied.

    Returns:
        For each other rank, like `parameters`.

    Raises:
        CollectiveError: NCCL fails.

    Streams:
        The caller's current ones of all devices.
    """
    sent: Sequence[Sequence[Tensor | None]] = [[None] * len(parameters) for _ in lanes]
    if nccl is not None:
        sent = nccl.copies(parameters)
    return [
        [
            (_copy(tensor, lane) if there is None else there).requires_grad_(tensor.requires_grad)
            for tensor, there in zip(parameters, column, strict=True)
        ]
        for lane, column in zip(lanes[1:], sent[1:], strict=True)
    ]


def _copy(tensor: Tensor, lane: Lane) -> Tensor:
    # The host waits for copies to its own memory alone.
    return tensor.detach().to(lane.device, non_blocking=lane.device.type != "cpu", copy=True)


def _fresh(buffers: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of buffers on a device, each with a version counter of its own."""
    bare = [tensor.detach() for tensor in buffers]
    with torch.no_grad():
        made = carry(bare, device, anew=True)
    copies = [tensor.data for tensor in made]
    for tensor, before in zip(copies, buffers, strict=True):
        if vars(before):
            vars(tensor).update(vars(before))
    return copies


def _each_once(tables: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    tensors = (tensor for table in tables for tensor in table.values() if tensor is not None)
    return [*{id(tensor): tensor for tensor in tensors}.values()]
