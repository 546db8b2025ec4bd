"""Mean by NCCL: one all-reduce over all devices, launched by one thread for all ranks.

A kernel of NCCL spins until its peers run too. So nothing that may wait for the device can stand between the
first and the last of them: the last arrival at the gate launches them all in one group, while the workers
stand in the gate and no other thread allocates or pins (`QUIET`).

Each rank scales its replica by its samples where these differ, the group sums, and each divides by the
summed weight, which rides along in a tail of its own. So a rank that its device finds not to be finite leaves
itself out, and all hear of it in that sum. So one pass of ours is around NCCL where samples are equal, and
two elsewhere. Not NCCL's own mean: that knows no weights, rounds 1 / n to the tensor's dtype, and loses the
reduction inside the switch, which is worth more than the pass.

A communicator knows no fewer ranks than it was made for. When ranks have left, the next launch makes new ones
for the others, while these stand in the gate.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import nan, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowdp.collective.base import relative_drift
from flowdp.collective.fused import import_cupy
from flowdp.collective.nccl_setup import (
    MAKING_S,
    REMAKING_S,
    CommunicatorSetup,
    Members,
    Side,
    abort_all,
    abort_quietly,
    nccl_errors,
    sum_replicas,
)
from flowdp.collective.on_streams import StreamedMean
from flowdp.collective.watchdog import LIMIT_S, Watchdog
from flowdp.device.flat_parameters import Flat, FlatTensors
from flowdp.device.streams import QUIET, Event, Lane
from flowdp.errors import CollectiveError
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["Group", "NcclMean", "load"]

MAPS = Path("/proc/self/maps")

log = logging.getLogger("flowdp")


def load(devices: Sequence[torch.device]) -> Any:
    """The module `cupy.cuda.nccl`, after checks for known failures with these devices of the ranks.

    Raises:
        CollectiveError: NCCL cannot be used here; the message names the package or setting.
    """
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise CollectiveError(
            "CUDA_LAUNCH_BLOCKING is set: each launch then waits for its kernel, and NCCL's kernels wait for "
            "the launches behind them; unset it, or pass backend='local'"
        )
    if torch.version.cuda is None:
        raise CollectiveError("this torch is built without CUDA, and NCCL is for CUDA devices")
    major = torch.version.cuda.split(".")[0]
    try:
        cupy = import_cupy()
    except ImportError as error:
        raise CollectiveError(
            f"NCCL is called through cupy, which cannot be imported ({error}): pip install "
            f"'flowdp[cuda{major}]' (cupy-cuda{major}x, for a torch of CUDA {torch.version.cuda})"
        ) from error
    nccl = cupy.cuda.nccl
    if not nccl.available:
        raise CollectiveError(
            f"cupy finds no NCCL: pip install nvidia-nccl-cu{major}, which torch brings too"
        )
    theirs = str(cupy.cuda.runtime.runtimeGetVersion() // 1000)
    if theirs != major:
        raise CollectiveError(
            f"torch is built for CUDA {torch.version.cuda} and cupy for CUDA {theirs}: pip uninstall "
            f"cupy-cuda{theirs}x, then pip install 'flowdp[cuda{major}]'"
        )
    _check_nccl(nccl.get_version(), devices)
    return nccl


def _opened(comms: Sequence[Any]) -> Sequence[Any]:
    """The communicators, as they are now.

    Raises:
        CollectiveError: They are gone.
    """
    if not comms:
        raise CollectiveError("the ranks were to meet after NCCL was aborted or closed")
    return tuple(comms)


def _check_nccl(version: int, devices: Sequence[torch.device]) -> None:
    """Check that torch and cupy use one NCCL, and that it supports these devices."""
    cupys = version // 10_000, version // 100 % 100, version % 100
    torchs = torch.cuda.nccl.version()[:3] if hasattr(torch._C, "_nccl_version") else cupys
    try:
        lines = MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    mapped = sorted({line.split(maxsplit=5)[-1] for line in lines if "/libnccl.so" in line})
    # Its symbols come before those of all others, whichever torch and cupy have loaded besides.
    files = [file for file in mapped if _is_preloaded(file)][:1] or mapped
    numbers = f"torch is built for NCCL {_dotted(torchs)}, cupy uses {_dotted(cupys)}"
    # Torch's number is that of the header it was compiled with: of one loaded file it says nothing.
    if len(files) > 1 or (not files and torchs[:2] != cupys[:2]):
        raise CollectiveError(
            f"{numbers} (loaded: {', '.join(files) or 'unknown'}): two libraries would wait for each other "
            "on one device. Keep the one that torch requires, see `pip show torch`, and look for another one "
            "in LD_LIBRARY_PATH and LD_PRELOAD"
        )
    if torchs != cupys:
        log.debug(numbers)
    if len(set(devices)) == len(devices):
        return
    if cupys < (2, 30) or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        raise CollectiveError(
            "several ranks on one device need NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1 in the "
            f"environment before NCCL starts (this is NCCL {_dotted(cupys)}); backend='local' does without"
        )


def _is_preloaded(file: str) -> bool:
    """Whether `LD_PRELOAD` names a mapped file, by its path or its name."""
    named = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return any(os.path.realpath(name) == file if "/" in name else name == Path(file).name for name in named)


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that take one mean together.

    Attributes:
        comms: Communicators of those of this process; none after an abort.
        samples: Weights of all.
        first: The first of this process among them.
    """

    comms: Sequence[Any]
    samples: Sequence[float]
    first: int = 0


class NcclMean(StreamedMean):
    """Averages replicas on CUDA devices by one all-reduce; see `Collective`.

    Memory: bfloat16 and float16 parameters once more in float32, float buffers in float64, int16 tensors in
    int32; else none. The drift is the weighted mean over the members, the same number for all, and cannot
    tell less than about 5e-4 from zero.

    Args:
        replicas: One per rank.
        lanes: One per rank.
        nccl: Replacement of `cupy.cuda.nccl`, in tests.
        hung: Called, on a thread of its own, when a round does not end on the devices; they are released, and
            the mean is not to be trusted, as soon as it returns.
        outer: Outer step behind each mean; None: there is none.
        members: These ranks among those of several machines; None: they are all.

    Raises:
        OptionError: The replicas differ in structure, or a rank trains on the CPU.
        CollectiveError: NCCL does not work here; the replicas are as they were.

    Threads:
        Made by one thread, before the workers run; `CommunicatorSetup.wait` bounds its wait.
    """

    def __init__(
        self,
        replicas: Sequence[FlatTensors],
        lanes: Sequence[Lane],
        nccl: Any = None,
        hung: Callable[[CollectiveError], object] = lambda _: None,
        outer: OuterOptions | None = None,
        members: Members | None = None,
    ) -> None:
        super().__init__(replicas, lanes, width=3, outer=outer)
        self._nccl = load([lane.device for lane in lanes]) if nccl is None else nccl
        self._hung = hung
        self._lock = threading.Lock()  # guards the two below, which an abort and a close change
        self._comms: list[Any] = []
        self._is_over = False
        self._members = tuple(range(len(lanes)))  # ranks of the communicators
        flats = [replica.flats for replica in replicas]
        self._load_kernels()
        try:
            with QUIET:
                self._sides = [Side(self._nccl, *place) for place in zip(lanes, flats, strict=True)]
            self._comms = self._open(flats, members)
        except torch.OutOfMemoryError as error:
            raise CollectiveError(
                f"no room for NCCL beside the replicas; backend='local' does without: {error}"
            ) from error
        self._watchdog = Watchdog([lane.device for lane in lanes], LIMIT_S, self._give_up)

    def launch(self, outcome: Outcome) -> None:
        """See `Collective.launch`.

        The first time after ranks have left it takes a second or two, and waits for the devices.

        Raises:
            CollectiveError: The collective was aborted, NCCL refuses, or does not work without those that
                left.
        """
        self._fit(outcome)
        super().launch(outcome)

    def _fit(self, outcome: Outcome) -> None:
        """Make communicators for the members of a round, where ranks have left."""
        if outcome.members != self._members:
            left = sorted(set(self._members).difference(outcome.members))
            self._members = outcome.members
            try:
                self._make_anew()
            except CollectiveError as error:
                raise CollectiveError(
                    f"rank {', '.join(map(str, left))} left, and NCCL does not work for the others alone: "
                    f"{error}"
                ) from error

    def _open(self, flats: Sequence[Sequence[Flat]], members: Members | None) -> list[Any]:
        """Make the communicators of the ranks here, among others or for these alone."""
        wait_s = {} if members is None else {"sums_s": MAKING_S}  # those of other machines load kernels
        return CommunicatorSetup(self._nccl, self._lanes, flats, members=members).wait(**wait_s)

    def abort(self) -> None:
        """See `Collective.abort`. It returns after a few seconds at most."""
        try:
            abort_quietly(self._take())
        finally:
            self._watchdog.close()

    def close(self) -> None:
        """See `Collective.close`."""
        comms = self._take()
        try:
            self._watchdog.close()
            super().close()
            with QUIET:  # the last one frees the memory of all on their devices
                while comms:
                    comms.pop(0).destroy()
        except BaseException:
            abort_all(comms)  # else the garbage collector destroys them, at any time
            raise

    def _give_up(self, error: CollectiveError) -> None:
        """Report a hang first: the workers, once released, go on with a mean that is none."""
        try:
            self._hung(error)
        finally:
            self.abort()

    def _take(self, *, is_over: bool = True) -> list[Any]:
        with self._lock:
            self._is_over = self._is_over or is_over
            comms, self._comms = self._comms, []
        return comms

    def _make_anew(self) -> None:
        """Communicators for the members that are left; a single one needs none.

        The old ones are aborted, not destroyed: an abort does not wait, whatever the device of a rank that
        left is doing. All of them are, for they share memory. `QUIET` is held to the end, because other
        threads of the run prefetch meanwhile.
        """
        lanes = [self._lanes[member] for member in self._members]
        for lane in lanes:
            lane.drain()  # else an abort would cut the last mean off
        with QUIET:
            self._watchdog.forget()
            abort_all(self._take(is_over=False))
            if len(lanes) == 1 or self._is_over:
                return
            flats = [self._replicas[member].flats for member in self._members]
            try:
                comms = CommunicatorSetup(self._nccl, lanes, flats, quiet=nullcontext()).wait(REMAKING_S)
            except torch.OutOfMemoryError as error:
                raise CollectiveError(f"no room for its first sums: {error}") from error
            with self._lock:
                if not self._is_over:
                    self._comms, comms = comms, []
            abort_all(comms)  # of a run that has failed meanwhile

    def _workers(self, outcome: Outcome) -> Sequence[int]:
        return self._here(outcome)

    def _writers(self, rank: int, _workers: Sequence[int]) -> Sequence[int]:  # only itself
        return (rank,)

    def _enqueue(self, outcome: Outcome, workers: Sequence[int]) -> dict[int, Tensor]:
        with self._lock:
            group = self._group(outcome)
            comms = _opened(group.comms)
        with nccl_errors(
            self._nccl, "sum the replicas, which are scaled already and not to be used any more"
        ):
            sides = [self._sides[member] for member in workers]
            bad = [self._bad[member] for member in workers]
            sum_replicas(
                self._nccl,
                comms,
                sides,
                group.samples,
                drift=outcome.drift,
                bad=bad,
                first=group.first,
            )
        # One row for all: they hold the same bits, and one copy to the host is enough.
        return {workers[0]: self._sides[workers[0]].tail} if outcome.drift else {}

    def _group(self, outcome: Outcome) -> Group:
        """The ranks that take the mean of a round together."""
        return Group(self._comms, [outcome.samples[member] for member in outcome.members])

    def _launched(self, outcome: Outcome, start: Sequence[Event], done: Sequence[Event]) -> None:
        self._watchdog.launched(outcome.round, start[0], done)  # all begin when the last step is done

    def _drift(
        self,
        _rank: int,
        _outcome: Outcome,
        rows: Sequence[Sequence[float]],
    ) -> tuple[float, float]:
        weight, square, mean_square = rows[0]
        if weight == 0.0:
            return nan, nan
        away = square / weight - mean_square
        return relative_drift(0.0 if away < 0.0 else away, mean_square), sqrt(mean_square)
