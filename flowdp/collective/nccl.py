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

With several machines one communicator has the ranks of all: NCCL finds the way itself, within a machine from
board to board, between machines by their network. Inner rounds have one of each machine's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import nan, sqrt
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowdp.collective.communicators import Communicators, Members, room_errors
from flowdp.collective.fused import import_cupy
from flowdp.collective.mean import relative_drift
from flowdp.collective.nccl_sums import Side, gather_calls, nccl_errors, sum_call, sum_replicas
from flowdp.collective.on_streams import StreamedMean
from flowdp.device.flat_parameters import FlatReplica, FlatTensors
from flowdp.device.streams import QUIET, Lane
from flowdp.errors import CollectiveError
from flowdp.network.machines import Machines
from flowdp.network.team import Team
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["NcclMean", "load", "open_nccl_machines"]

Result = TypeVar("Result")


def load() -> Any:
    """The module `cupy.cuda.nccl`.

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
        nccl = import_cupy().cuda.nccl
    except ImportError as error:
        raise CollectiveError(
            f"NCCL is called through cupy, which cannot be imported ({error}): pip install "
            f"'flowdp[cuda{major}]' (cupy-cuda{major}x, for a torch of CUDA {torch.version.cuda})"
        ) from error
    if not nccl.available:
        raise CollectiveError(
            f"cupy finds no NCCL: pip install nvidia-nccl-cu{major}, which torch brings too"
        )
    return nccl


class NcclMean(StreamedMean):
    """Averages replicas on CUDA devices by one all-reduce; see `Collective`.

    Memory: bfloat16 and float16 parameters once more in float32, float buffers in float64, int16 tensors in
    int32; else none. The drift is the weighted mean over the members, the same number for all, and cannot
    tell less than about 5e-4 from zero.

    With a `team` on several machines the means are of all of them, and inner rounds of this machine alone;
    indices of ranks are those of this machine then, outcomes are of all.

    Args:
        replicas: One per rank of this machine.
        lanes: One per rank of this machine.
        nccl: cupy's module, or its replacement in tests; None: `load` finds it.
        outer: Outer step behind each mean, of all machines; None: there is none.
        team: The ranks of all machines; None: these are all.
        name: NCCL's name of the group of all machines.

    Raises:
        OptionError: A rank trains on the CPU.
        CollectiveError: NCCL does not work here, or another machine did not come; the replicas are as they
            were.

    Threads:
        Made by one thread, before the workers run; `Communicators` bounds its wait.
    """

    def __init__(
        self,
        replicas: Sequence[FlatTensors],
        lanes: Sequence[Lane],
        nccl: Any = None,
        outer: OuterOptions | None = None,
        team: Team | None = None,
        name: Any = None,
    ) -> None:
        super().__init__(replicas, lanes, width=3, outer=outer)
        self._nccl = load() if nccl is None else nccl
        self._members = tuple(range(len(lanes)))  # ranks of the communicators
        self._team = team
        members = None
        if team is not None:
            self.first, self._is_alone = team.ranks.start, False
            members = Members(name, team.ranks, team.world_size)
            # Of parameters the host tells the gate: an inner round of one rank has no mean to replace what
            # its device rejects.
            self.masks = not isinstance(replicas[0], FlatReplica)
        self._load_kernels()
        with room_errors():
            with QUIET:
                self._sides = [
                    Side(self._nccl, lane, replica.flats, rank)
                    for rank, (lane, replica) in enumerate(zip(lanes, replicas, strict=True))
                ]
            flats = [replica.flats for replica in replicas]
            self._comms = Communicators(self._nccl, lanes, flats, members)
            self._inner: Communicators | None = None  # of this machine alone
            if team is not None and team.options.rounds > 1 and len(lanes) > 1:
                try:
                    self._inner = Communicators(self._nccl, lanes, flats)
                except BaseException:
                    self._comms.abort()
                    raise

    def launch(self, outcome: Outcome, behind: Callable[[], object] = lambda: None) -> None:
        """See `Collective.launch`.

        The first time after ranks have left it takes a second or two, and waits for the devices.

        Raises:
            CollectiveError: The collective was aborted, NCCL refuses, or does not work without those that
                left.
        """
        self._fit(outcome)
        super().launch(outcome, behind)

    def _fit(self, outcome: Outcome) -> None:
        """Make communicators for the members of a round, where ranks have left.

        `QUIET` is held to the end, because other threads of the run prefetch meanwhile. Ranks of several
        machines end together.
        """
        if self._team is not None or outcome.members == self._members:
            return
        left = ", ".join(map(str, sorted(set(self._members).difference(outcome.members))))
        self._members = outcome.members
        lanes = [self._lanes[member] for member in self._members]
        flats = [self._replicas[member].flats for member in self._members]
        for lane in lanes:
            lane.drain()  # else an abort would cut the last mean off

        try:
            with QUIET, room_errors():
                self._comms.renew(lanes, flats)
        except CollectiveError as error:
            raise CollectiveError(
                f"rank {left} left, and NCCL does not work for the others alone: {error}"
            ) from error

    def abort(self) -> None:
        """See `Collective.abort`. It returns after a few seconds at most."""
        for comms in filter(None, (self._comms, self._inner)):
            comms.abort()

    def close(self) -> None:
        """See `Collective.close`."""
        for comms in filter(None, (self._comms, self._inner)):
            comms.close()

    def _here(self, outcome: Outcome) -> Sequence[int]:
        if self._team is None:
            return outcome.members
        ranks = self._team.ranks
        return [rank - ranks.start for rank in outcome.members if rank in ranks]

    def _writers(self, rank: int, _workers: Sequence[int]) -> Sequence[int]:  # only itself
        return (rank,)

    def _enqueue(self, outcome: Outcome, workers: Sequence[int]) -> dict[int, Tensor]:
        comms, samples = self._group(outcome)
        what = "sum the replicas, which are scaled already and not to be used any more"
        sum_replicas(
            partial(comms.launch, what=what),
            [self._sides[member] for member in workers],
            samples,
            drift=outcome.drift,
            bad=[self._bad[member] for member in workers],
            first=0 if outcome.inner else self.first,
        )
        # One row for all: they hold the same bits, and one copy to the host is enough.
        return {workers[0]: self._sides[workers[0]].tail} if outcome.drift else {}

    def add_up(self, numbers: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `StreamedMean.add_up`."""
        pairs = zip(self._lanes, numbers, strict=True)
        calls = [[sum_call(self._nccl, lane, number)] for lane, number in pairs]
        self._comms.launch(calls, "add up the norms")
        return numbers

    def spread(self, replicas: Sequence[FlatTensors]) -> None:
        """See `StreamedMean.spread`."""
        places = enumerate(zip(self._lanes, replicas, strict=True))
        calls = [gather_calls(self._nccl, lane, replica.flats, rank) for rank, (lane, replica) in places]
        self._comms.launch(calls, "give each rank's parameters to the others")

    def _group(self, outcome: Outcome) -> tuple[Communicators, Sequence[float]]:
        """The communicators of the ranks that take the mean of a round together, and the weights of these."""
        if self._team is None:
            return self._comms, [outcome.samples[member] for member in outcome.members]
        if outcome.inner:
            assert self._inner is not None
            return self._inner, [outcome.samples[rank] for rank in self._team.ranks]
        return self._comms, _weights(outcome, self._team)

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


def _weights(outcome: Outcome, team: Team) -> Sequence[float]:
    """Weight of each rank's replica in the mean of all machines.

    A machine weighs as much as the samples of all its rounds since the last one; its replicas have parts in
    that by the steps since their own last mean. Shape (world_size,).
    """
    if not outcome.earlier:
        return outcome.samples
    weights: list[float] = []
    for machine in range(len(team.sizes)):
        ranks = team.of(machine)
        local, samples = outcome.local_weights(ranks), sum(outcome.weights[rank] for rank in ranks)
        weights += [samples * weight / max(1, sum(local)) for weight in local]
    return weights


def open_nccl_machines(
    replicas: Sequence[FlatTensors],
    lanes: Sequence[Lane],
    team: Team,
    outer: OuterOptions | None = None,
) -> NcclMean:
    """Open NCCL on all machines, or on none.

    The name of their group, which machine 0 makes, travels by `torch.distributed`.

    Raises:
        CollectiveError: It does not work on one of them; every machine raises it.

    Threads:
        The one that starts the run; all machines make this call.
    """
    machines = team.machines
    assert machines is not None
    nccl = _on_all(machines, load)
    name = machines.share(_on_all(machines, lambda: _named(nccl) if machines.leads else None))
    return _on_all(
        machines,
        lambda: NcclMean(replicas, lanes, nccl, outer, team, name),
        lambda mean: mean.abort(),
    )


def _named(nccl: Any) -> Any:
    with nccl_errors(nccl, "name a group of machines"):
        return nccl.get_unique_id()


def _on_all(
    machines: Machines, work: Callable[[], Result], undo: Callable[[Result], object] = lambda _: None
) -> Result:
    """Do a part of the start on all machines.

    Args:
        machines: All of them; each makes this call.
        work: The part.
        undo: Takes the result back, where another machine has failed.

    Raises:
        CollectiveError: It has failed on one of them; every machine raises it.
    """
    result: list[Result] = []
    problem: CollectiveError | None = None
    try:
        result.append(work())
    except CollectiveError as error:
        problem = error
    problems = machines.gather("" if problem is None else str(problem))
    failed = [f"{name}: {text}" for name, text in zip(machines.names, problems, strict=True) if text]
    if failed:
        for opened in result:
            undo(opened)
        text = "; ".join(failed)
        raise CollectiveError(f"{text}; between machines, backend='cpu' does without NCCL") from problem
    return result[0]
