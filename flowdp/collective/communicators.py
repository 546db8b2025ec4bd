"""NCCL communicators of a group of ranks: creation, check and life.

`nccl` is cupy's module of that name throughout, or its replacement in tests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import torch

from flowdp.collective.nccl_sums import Call, Side, gather_calls, launch_group, nccl_errors, sum_replicas
from flowdp.device.flat_parameters import Flat
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import CollectiveError

__all__ = ["ABORT_S", "CommunicatorSetup", "Communicators", "Members", "abort_all", "room_errors"]

MAKING_S = 120.0
"""Limit on making the communicators: one or two seconds as a rule, but eight big cards have taken 55, nearly
all of it to load kernels (NVIDIA/nccl#1646)."""

REMAKING_S = 30.0
"""Limit on making them once more, when ranks have left: the kernels are loaded by then."""

SUMS_S = 10.0
"""Limit on the first sums, once the communicators are made. Other machines may still load kernels, and have
`MAKING_S`."""

ABORT_S = 2.0
"""Limit on an abort; then its threads are left alone."""

CHECKED = 1 << 26
"""Elements of a part of a flat that the first sums have, at most. NCCL connects an algorithm when a size
first asks for it, so the first sums have the sizes of all later ones; beyond this its choice is the same."""

_MAKING = threading.Lock()
"""Communicators are made by one thread of the process at a time: two that wait for their devices in turns
would wait for each other."""


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of this process among those of its communicators, of which other processes may have more.

    Attributes:
        name: NCCL's name of the group, which all of its processes know; None: it has none yet.
        ranks: Ranks of this process.
        size: Ranks of all.
    """

    name: Any
    ranks: range
    size: int


class CommunicatorSetup:
    """Creation of communicators on a thread of its own: a call that hangs in NCCL cannot be cancelled.

    `QUIET` is held only for allocations before the first sum: a thread that hangs would never give it
    back. Allocations of another run meanwhile can at worst make this one late. Where threads of this run
    allocate, too, the waiting thread holds it all the time.

    The thread that takes the communicators hands them out or aborts them, so that each is aborted once. While
    the thread may be inside NCCL, no other aborts them: NCCL would free memory that the thread uses.

    The replicas' flats are not changed. `quiet` is `QUIET`, or nothing where the caller of `wait` holds it.
    Without `members` the ranks of the lanes are all.
    """

    def __init__(
        self,
        nccl: Any,
        lanes: Sequence[Lane],
        flats: Sequence[Sequence[Flat]],
        quiet: AbstractContextManager[Any] = QUIET,
        members: Members | None = None,
    ) -> None:
        self._nccl = nccl
        self._members = members or Members(None, range(len(lanes)), len(lanes))
        self._quiet = quiet
        self._lanes = lanes
        self._flats = flats
        self._errors: list[BaseException] = []
        self._is_made = threading.Event()
        self._is_over = threading.Event()
        self._lock = threading.Lock()  # guards the three below, and the order of end and timeout
        self._comms: list[Any] = []
        self._is_given_up = False
        self._is_outside = False  # of NCCL: the thread waits for the device

    def wait(self, making_s: float = MAKING_S) -> list[Any]:
        """The communicators, one per rank, whose sums were right.

        Raises:
            CollectiveError: They could not be made, or are late or wrong. None is left, or one that hangs
                inside NCCL aborts them itself when it comes back.
        """
        sums_s = SUMS_S if self._members.size == len(self._lanes) else MAKING_S
        for lane in self._lanes:
            lane.drain()
        if not _MAKING.acquire(timeout=making_s):
            raise CollectiveError("another run of this process still hangs in NCCL's start")
        threading.Thread(target=self._run, name="flowdp-nccl", daemon=True).start()
        try:
            is_made = self._is_made.wait(making_s)
            is_over = is_made and self._is_over.wait(sums_s)
        except BaseException:  # Ctrl-C
            abort_all(self._leave())
            raise
        comms = self._leave()
        if is_over and not self._errors:
            return comms
        abort_all(comms)
        if is_over:
            # Taken out: a kept error keeps its frames, and they the memory of the sums.
            raise self._errors.pop()
        if is_made:
            raise CollectiveError(
                f"NCCL's first sums on {self._where()} were not there within {sums_s:g} s. If the boards "
                "cannot reach each other's memory, NCCL_P2P_DISABLE=1 helps; NCCL_DEBUG=INFO says more"
            )
        raise CollectiveError(
            f"NCCL did not make its communicators for {self._where()} within {making_s:g} s; NCCL_DEBUG=INFO "
            "says what it is doing"
        )

    def _leave(self) -> list[Any]:
        """Stop waiting; returns the communicators that may be used or aborted now."""
        with self._lock:
            self._is_given_up = not self._is_over.is_set()
            return self._take() if self._is_outside or not self._is_given_up else []

    def _take(self) -> list[Any]:
        comms, self._comms = self._comms, []
        return comms

    def _run(self) -> None:
        try:
            with nccl_errors(self._nccl, f"make communicators for {self._where()}"):
                self._make()
            self._is_made.set()
            self._check()
        except BaseException as error:
            self._errors.append(error)
        with self._lock:
            self._is_over.set()
            comms = self._take() if self._is_given_up else []
        self._is_made.set()
        abort_all(comms)
        _MAKING.release()

    def _make(self) -> None:
        """Make all communicators in one group: each alone would wait for the others.

        `initAll` does the same, but holds the interpreter lock meanwhile.
        """
        members = self._members
        name = members.name or self._nccl.get_unique_id()
        self._nccl.groupStart()
        try:
            for rank, lane in zip(members.ranks, self._lanes, strict=True):
                with lane.on(lane.comm):  # NCCL takes the current device
                    self._comms.append(self._nccl.NcclCommunicator(members.size, name, rank))
        finally:
            self._nccl.groupEnd()

    def _check(self) -> None:
        """Take two means of known values; first-use allocations are made here."""
        self._go(outside=False)
        ranks, size = self._members.ranks, self._members.size
        with self._quiet:
            flats = [
                [_stand_in(lane, flat) for flat in rank_flats]
                for lane, rank_flats in zip(self._lanes, self._flats, strict=True)
            ]
            places = list(zip(self._lanes, flats, ranks, strict=True))
            sides = [Side(self._nccl, *place) for place in places]
        gathers = [gather_calls(self._nccl, *place) for place in places]
        wrong: list[str] = []  # raised behind both sums: another machine waits for this one in the second
        for samples in (range(1, size + 1), range(size)):
            if not any(samples):
                continue
            self._go(outside=False)
            for rank, side in zip(ranks, sides, strict=True):
                side.fill(rank + 1, rank % 2)
            with nccl_errors(self._nccl, f"take its first sums on {self._where()}"):
                launch = partial(launch_group, self._nccl, self._comms)
                sum_replicas(launch, sides, samples, drift=True, first=ranks.start)
                if any(gathers):
                    launch(gathers)
            self._go(outside=True)
            mean = sum(count * (rank + 1) for rank, count in enumerate(samples)) / sum(samples)
            for rank, side in zip(ranks, sides, strict=True):
                if not (away := side.distance(mean, min(size - 1, 1))) < 1e-2 * mean:
                    wrong.append(f"rank {rank} wrong sums, {away:g} away from {mean:g}")
        if wrong:
            raise CollectiveError(
                f"NCCL on {self._where()} gives {wrong[0]}: the boards do not reach each other's memory as "
                "they claim; try NCCL_P2P_DISABLE=1"
            )

    def _go(self, *, outside: bool) -> None:
        """Continue, in NCCL or outside of it, if the caller still waits."""
        with self._lock:
            if self._is_given_up:
                raise CollectiveError("NCCL was given up")
            self._is_outside = outside

    def _where(self) -> str:
        devices = ", ".join(str(lane.device) for lane in self._lanes)
        others = self._members.size - len(self._lanes)
        return f"{devices} and {others} of other machines" if others else devices


def _stand_in(lane: Lane, flat: Flat) -> Flat:
    """A flat that may be written over, in memory of `compute`, which training uses again afterwards."""
    split = min(flat.split, CHECKED // flat.spans * flat.spans)
    length = split + min(flat.memory.numel() - flat.split, CHECKED)
    with lane.on(lane.compute):
        memory = torch.empty(length, dtype=flat.memory.dtype, device=flat.memory.device)
    return Flat(memory, split, spans=flat.spans)


def abort_all(comms: Sequence[Any]) -> None:
    """Abort all, each on a thread of its own: one that is aborted waits for those that are not yet."""
    threads = [threading.Thread(target=comm.abort, name="flowdp-nccl-abort", daemon=True) for comm in comms]
    for thread in threads:
        thread.start()
    end_s = monotonic() + ABORT_S
    for thread in threads:
        thread.join(max(0.0, end_s - monotonic()))


class Communicators:
    """Communicators of ranks of this process, for as long as nothing fails.

    Args:
        nccl: cupy's module.
        lanes: Lanes of the ranks.
        flats: Memory of each rank that will be summed.
        members: The ranks of the lanes among all; None: they are all.

    Raises:
        CollectiveError: See `CommunicatorSetup.wait`.

    Threads:
        `launch`, `renew`: one at a time. Others: any.
    """

    def __init__(
        self,
        nccl: Any,
        lanes: Sequence[Lane],
        flats: Sequence[Sequence[Flat]],
        members: Members | None = None,
    ) -> None:
        self._nccl, self._lanes = nccl, tuple(lanes)
        self._lock = threading.Lock()  # guards the two below, which an abort and a close change
        self._comms = CommunicatorSetup(nccl, lanes, flats, members=members).wait()
        self._error: CollectiveError | None = None

    def launch(self, calls: Sequence[Sequence[Call]], what: str) -> None:
        """Launch the calls of each rank here as one group.

        Args:
            calls: Those of each rank here.
            what: The operation, for the error: "NCCL could not ...".

        Raises:
            CollectiveError: NCCL refuses, or they have been aborted or closed.
        """
        with self._lock:
            if self._error is not None:
                raise type(self._error)(*self._error.args)
            comms = list(self._comms)
        with nccl_errors(self._nccl, what):
            launch_group(self._nccl, comms, calls)

    def renew(self, lanes: Sequence[Lane], flats: Sequence[Sequence[Flat]]) -> None:
        """Abort all and make others for some of the ranks, with `QUIET` held; a single one needs none.

        Nothing is made where they have been given up.

        They are not destroyed: an abort does not wait, whatever the device of a rank that left is doing. All
        of them are, for they share memory.
        """
        abort_all(self._take())
        comms: list[Any] = []
        if self._error is None and len(lanes) > 1:
            setup = CommunicatorSetup(self._nccl, lanes, flats, quiet=nullcontext())
            comms = setup.wait(REMAKING_S)
        with self._lock:
            if self._error is None:
                self._comms, comms = comms, []
        abort_all(comms)  # of a run that has failed meanwhile

    def abort(self, error: CollectiveError | None = None) -> None:
        """Abort all while no thread of the process is inside a call on one, as NCCL wants it.

        A call that hangs is no reason to wait for ever. Later launches raise the error.
        """
        comms = self._take(error or CollectiveError("NCCL was aborted or closed"))
        is_quiet = QUIET.acquire(timeout=ABORT_S / 2) if comms else False
        try:
            abort_all(comms)
        finally:
            if is_quiet:
                QUIET.release()

    def close(self) -> None:
        """Give them back behind the work of the devices; a second time does nothing."""
        comms = self._take(CollectiveError("NCCL was aborted or closed"))
        # The garbage collector may call this from a thread that holds QUIET, and then must not wait.
        if QUIET.acquire(timeout=ABORT_S / 2):
            try:
                self._destroy(comms)
            finally:
                QUIET.release()
        else:
            threading.Thread(target=self._destroy_later, args=(comms,), name="flowdp-nccl-close").start()

    def _destroy_later(self, comms: list[Any]) -> None:
        with QUIET:
            self._destroy(comms)

    def _destroy(self, comms: list[Any]) -> None:
        try:
            with ExitStack() as draining:  # of every lane, also where the device of one is dead
                for lane in self._lanes:
                    draining.callback(lane.drain)
            while comms:
                comms.pop(0).destroy()  # the last one frees the memory of all
        except BaseException:
            abort_all(comms)  # else the garbage collector destroys them, at any time
            raise

    def _take(self, error: CollectiveError | None = None) -> list[Any]:
        with self._lock:
            self._error = self._error or error
            comms, self._comms = self._comms, []
        return comms


@contextmanager
def room_errors() -> Iterator[None]:
    """Turn a lack of memory into a `CollectiveError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CollectiveError(
            f"no room for NCCL beside the replicas; backend='local' does without: {error}"
        ) from error
