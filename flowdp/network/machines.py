"""The machines of a job: one process of flowdp on each, in a process group of `torch.distributed`.

A launcher starts the processes (torchrun, Slurm, Ray Train), and `torch.distributed` finds them and carries
every byte between them; nothing here opens a connection of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flowdp.device.accelerator import accelerator_type
from flowdp.errors import CollectiveError, MachineLostError, OptionError
from flowdp.policy.formats import format_error

__all__ = [
    "BACKENDS",
    "Machines",
    "Reduction",
    "backend_here",
    "check_world",
    "find_machines",
    "world_here",
]

Answer = TypeVar("Answer")

Reduction = Literal["sum", "max"]

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
"""Backends of `torch.distributed` for tensors on accelerators; on ROCm "nccl" is RCCL."""

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the environment by which torchrun, and launchers like it, describe a job."""

START_S = 600.0
"""Seconds for which a machine waits for another one at the start of a run: that may still read its data."""

STORE_S = 2.0
"""Seconds for which the store is waited for: with a frozen machine 0, which keeps it, it never answers."""

LOOK_S = 1.0
"""Time after which a machine that waits for a sum looks whether one has been lost."""

SUM = "a sum"

_stuck: list[tuple[dist.ProcessGroup, list[dist.Work]]] = []
"""Sums that were given up, with their groups: one that is freed would wait for them, up to its timeout."""

_dropped: deque[list[dist.ProcessGroup]] = deque()
"""Groups of `Machines` that were dropped. The garbage collector, which finds these at any moment, leaves them
to the next that opens some: torch.distributed keeps a table of groups, which it may be reading just then."""


class Machines:
    """The machines of a job, as one of them sees them.

    Every machine makes the same calls of `gather`, `share` and `reduce`, in the same order; one thread at a
    time of each. They have groups of their own, each with sockets and threads: those of a run are given back
    at its end (`closer`), and one that fails before it ends the lobby, where the others wait for it.

    Args:
        timeout_s: Longest wait for another machine within a run; before it, one may still read its data, and
            `gather`, `share` and `spread` wait as long as `START_S`.

    Attributes:
        index: Number of this machine, from 0; machine 0 leads.
        count: Number of machines.
        names: Name of each machine for people: its host, with its number. Shape (count,).
        timeout_s: Longest wait for another machine.

    Raises:
        CollectiveError: Not all machines came here in time.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._world = world_here()
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.names = tuple(f"machine {index}" for index in range(self.count))
        # Nothing else keeps a group, but for those who have opened it: the last reference holds its sockets.
        self._groups: list[dist.ProcessGroup] = []
        self._lobby: dist.ProcessGroup | None = None
        self._sums: dist.ProcessGroup | None = None
        self._is_used = False  # a run has been started
        self._is_given_up = False  # one writer sets it, once
        self._begun: list[dist.Work] = []  # reductions that may be on their way
        _stuck[:] = _pending()
        _close_dropped()
        weakref.finalize(self, _dropped.append, self._groups).atexit = False
        self._open()

    @property
    def leads(self) -> bool:
        """Whether this machine decides for all."""
        return self.index == 0

    def _open(self) -> None:
        """Open the lobby, where machines wait long for each other, and the group of sums."""
        try:
            self._lobby = self.open_group(max(self.timeout_s, START_S))
            self._lobby_name = self._lobby.group_name
            self._sums = self.open_group()
            hosts = self.gather(socket.gethostname())  # until then one of them may be connecting yet
            self.names = tuple(f"machine {index} ({host})" for index, host in enumerate(hosts))
        except BaseException:
            self.close()
            raise

    def open_group(self, timeout_s: float | None = None) -> dist.ProcessGroup:
        """Open another group of all machines, for messages or sums of its own, in the host's memory.

        Args:
            timeout_s: Longest wait for another machine; None: as within a run.

        Raises:
            CollectiveError: Not all machines came here in time.
        """
        if self._lobby is not None:
            # It waits longer, and hears of a machine that has failed; what follows does not.
            self.gather(None)
        try:
            if self._lobby is None:
                _meet_in_default_group()
            seconds = self.timeout_s if timeout_s is None else timeout_s
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        except Exception as error:
            raise MachineLostError(
                f"the {self.count} machines of this job do not reach each other: {format_error(error)}; each "
                "must run the same script, and make the same Trainers and calls of setup in the same order"
            ) from error
        assert isinstance(group, dist.ProcessGroup)
        self._groups.append(group)
        return group

    def close_group(self, group: dist.ProcessGroup) -> None:
        """Give a group back that nothing uses any more.

        Its sockets are closed with the last reference to it, and what others wait for on it fails at once.
        """
        self._lobby = None if group is self._lobby else self._lobby
        if group is self._sums:
            self._sums, self._begun = None, []  # these refer to it, too
        if group in self._groups:
            self._groups.remove(group)
            _destroy(group)

    def closer(self) -> Callable[[], None]:
        """Function that gives the groups of now back, at the end of their run; a later start has others."""
        groups = self._groups.copy()

        def close() -> None:
            while groups:
                self.close_group(groups.pop())

        return close

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Context of the start of a run, as `telling`; behind the first one with new groups.

        A start that fails, on whichever machine, leaves the others in the middle of a call: what is sent for
        the next start must not be taken for that.

        Raises:
            CollectiveError: Not all machines came here in time.
        """
        if self._is_used:
            self.close()
            self._open()
        self._is_used = True
        with self.telling():
            yield

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Context that tells the other machines an error inside: their calls, which it ends, name it.

        It ends the lobby, so that they hear of it at once, also where this process goes on.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, CollectiveError):  # of another machine, most likely, which has told
                told = format_error(error)
                _ask(lambda: _store().set(self._key(self.index), told), None)
            if self._lobby is not None:
                self.close_group(self._lobby)
            raise

    def gather(self, value: Any) -> list[Any]:
        """Values of all machines, in their order; any that can be pickled.

        Raises:
            CollectiveError: A machine was lost, or does not come.
        """
        values: list[Any] = [None] * self.count
        self._meet(
            "gathering values", lambda: dist.all_gather_object(values, value, group=_opened(self._lobby))
        )
        return values

    def share(self, value: Any) -> Any:
        """The value of machine 0, on all machines; the others' are ignored.

        Raises:
            CollectiveError: A machine was lost, or does not come.
        """
        box = [value]
        self._meet(
            "sharing a value", lambda: dist.broadcast_object_list(box, src=0, group=_opened(self._lobby))
        )
        return box[0]

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of the host's memory by those of machine 0.

        Raises:
            CollectiveError: A machine was lost, or does not come.
        """
        self._meet(
            "sharing tensors",
            lambda: [dist.broadcast(tensor, src=0, group=_opened(self._lobby)) for tensor in tensors],
        )

    def reduce(self, tensors: Sequence[Tensor], operations: Sequence[Reduction] = ()) -> None:
        """Replace tensors of the host's memory by their reductions over all machines, all at once.

        Every machine gets the same bits.

        Args:
            tensors: Contiguous; of the same shapes and dtypes on all machines.
            operations: Reduction of each; empty: sums.

        Raises:
            CollectiveError: A machine was lost, or does not come.
        """
        self.begin(tensors, operations)()

    def begin(self, tensors: Sequence[Tensor], operations: Sequence[Reduction] = ()) -> Callable[[], None]:
        """Begin a reduction as `reduce` does, and return before it is done.

        Returns:
            A function that waits for it, and raises the same. Until then the tensors are not to be touched.
        """
        works: list[dist.Work] = []
        group = self._sums

        def begin() -> None:
            chosen = operations or ("sum",) * len(tensors)
            for tensor, operation in zip(tensors, chosen, strict=True):
                work = dist.all_reduce(tensor, OPERATIONS[operation], group=_opened(group), async_op=True)
                assert work is not None
                works.append(work)

        if self._is_given_up:
            raise MachineLostError("another machine was lost before: make the Trainer anew")
        self._call(SUM, begin)
        self._begun = [work for work in self._begun if not work.is_completed()] + works
        return lambda: self._call(SUM, lambda: self._await(_opened(group), works))

    def give_up(self) -> None:
        """Wait for no sum any more, because a machine is lost.

        Another one may be waiting for the lost one in the same sum, and this one for that, up to the timeout.

        Threads:
            Any.
        """
        self._is_given_up = True
        if self._sums is not None:
            _stuck.append((self._sums, self._begun))

    def _await(self, group: dist.ProcessGroup, works: list[dist.Work]) -> None:
        for work in works:
            while True:
                try:
                    work.wait(timedelta(seconds=LOOK_S))
                    break
                except RuntimeError:
                    if work.is_completed():
                        raise
                    if self._is_given_up:
                        _stuck.append((group, works))
                        raise

    def send(self, value: Any, machine: int) -> None:
        """Send a value to one other machine, which calls `receive`."""
        self._call(
            "sending a value", lambda: dist.send_object_list([value], machine, group=_opened(self._sums))
        )

    def receive(self, machine: int) -> Any:
        """Receive the value that another machine sends."""
        box: list[Any] = [None]
        self._call(
            "receiving a value", lambda: dist.recv_object_list(box, machine, group=_opened(self._sums))
        )
        return box[0]

    def close(self) -> None:
        """Give the groups back; a second call does nothing."""
        while self._groups:
            self.close_group(self._groups[-1])

    def _meet(self, what: str, work: Callable[[], object]) -> None:
        """Make a call of the time before a run, whose failure names the error that another machine told."""
        self._call(what, work, lambda: _ask(self._told, ""))

    def _call(self, what: str, work: Callable[[], object], told: Callable[[], str] = str) -> None:
        check_world(self._world)
        try:
            work()
        except Exception as error:
            error.__traceback__ = None  # its frames hold the group, and so the sockets
            failed = told()
            # What torch.distributed raises is a RuntimeError; another one is of a value that cannot travel.
            is_lost = not failed and isinstance(error, RuntimeError)
            reason = failed or f"one was lost, or did not come in time: {format_error(error)}"
            raise (MachineLostError if is_lost else CollectiveError)(
                f"{what} between the {self.count} machines of this job failed on {self.names[self.index]}: "
                f"{reason}"
            ) from error

    def _told(self) -> str:
        """The errors that other machines have told; "" where none has."""
        return "; ".join(
            f"{name} failed: {_store().get(self._key(index)).decode()}"
            for index, name in enumerate(self.names)
            if index != self.index and _store().check([self._key(index)])
        )

    def _key(self, index: int) -> str:
        """Place of a machine's error in the store of torch.distributed."""
        return f"flowdp/{self._lobby_name}/{index}"


def _close_dropped() -> None:
    with suppress(IndexError):  # there are no more
        while True:
            for group in _dropped.popleft():
                _destroy(group)


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(Exception):  # of a job that has ended its default group by itself
        dist.destroy_process_group(group)


def _opened(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group; None, which would be the default one, is an error."""
    if group is None:
        raise ConnectionError("this machine has closed its connection")  # no RuntimeError: nobody is lost
    return group


def _pending() -> list[tuple[dist.ProcessGroup, list[dist.Work]]]:
    """Sums that were given up and still wait, with their groups."""
    return [(group, works) for group, works in _stuck if not all(work.is_completed() for work in works)]


@atexit.register
def _keep_stuck() -> None:
    """Keep the groups of sums that still wait out of the interpreter's end, which would wait for them."""
    for group, _ in _pending():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _meet_in_default_group() -> None:
    """Wait for all machines over connections that exist, and so break where a machine is lost.

    Does nothing where the default group, the user's, has none for the host's memory.
    """
    world = dist.group.WORLD
    if world is not None and "cpu:" in dist.get_backend_config(world):
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=START_S))


def _store() -> Any:
    """The store by which the processes of the job have found each other."""
    return dist.distributed_c10d._get_default_store()


def _ask(question: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Ask the store, which may be gone with the machine that keeps it, or frozen.

    Its calls have no timeout of their own, so one that is not answered is left to a daemon thread.

    Returns:
        The answer; `otherwise`, where none comes.
    """
    answers = [otherwise]

    def ask() -> None:
        with suppress(Exception):
            answers.append(question())

    thread = threading.Thread(target=ask, name="flowdp-store", daemon=True)
    thread.start()
    thread.join(STORE_S)
    return answers[-1]


def world_here() -> object:
    """The default process group, where several machines are in it; None: this process is alone."""
    is_spread = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if is_spread else None


def check_world(world: object) -> None:
    """Check that the machines of now are those of an earlier moment.

    Args:
        world: What `world_here` returned then.

    Raises:
        OptionError: The default process group is another one.
    """
    if world_here() is not world:
        raise OptionError(
            "this Trainer, or this call of setup, belongs to another process group than the one of now, "
            "whose machines may be others: make it anew, inside the function that run_elastic calls, or "
            "after init_process_group"
        )


def backend_here() -> str:
    """Backend of the default process group: flowdp uses gloo, and tensors on devices need their own."""
    for kind, backend in BACKENDS.items():
        if kind == accelerator_type() and torch.accelerator.is_available():
            return f"cpu:gloo,{kind}:{backend}"
    return "gloo"


def find_machines(*, timeout_s: float) -> Machines | None:
    """Find the other machines of this job; None: there are none.

    An initialised process group is used as it is; where only the environment of torchrun is there, the
    default group is made of it.

    Args:
        timeout_s: Longest wait for another machine.

    Raises:
        CollectiveError: Not all machines came here in time.
        OptionError: The environment describes a job, and the process group cannot be made of it.
    """
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) < 2 or not all(name in os.environ for name in LAUNCHED):
            return None
        try:
            dist.init_process_group(backend_here())
        except Exception as error:
            raise OptionError(
                f"the environment describes a job of {os.environ['WORLD_SIZE']} processes (RANK, WORLD_SIZE, "
                f"MASTER_ADDR), and torch.distributed cannot join it: {format_error(error)}; machines=False "
                "trains in this process alone"
            ) from error
    return Machines(timeout_s) if dist.get_world_size() > 1 else None
