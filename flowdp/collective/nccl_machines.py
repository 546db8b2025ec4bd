"""The mean of several machines by NCCL: one all-reduce over the CUDA devices of all of them.

One communicator has the ranks of all machines; its name, which machine 0 makes, travels by
`torch.distributed`. NCCL finds the way itself: within a machine from board to board, between machines by
their network. As on one machine, its kernels wait for their peers, and all ranks of all machines stand in the
gate when they are launched. Inner rounds have a communicator of each machine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flowdp.collective.nccl import NcclMean, load
from flowdp.collective.nccl_setup import Communicators, Members, nccl_errors
from flowdp.device.flat_parameters import FlatReplica, FlatTensors
from flowdp.device.streams import Lane
from flowdp.errors import CollectiveError
from flowdp.network.machines import Machines
from flowdp.network.team import Team
from flowdp.options import OuterOptions
from flowdp.protocol.messages import Outcome

__all__ = ["NcclMachinesMean", "open_nccl_machines"]

Result = TypeVar("Result")


class NcclMachinesMean(NcclMean):
    """Averages the replicas of all machines; inner rounds those of this machine alone. See `NcclMean`.

    Indices of ranks are those of this machine, outcomes are of all.

    Args:
        replicas: One for each rank of this machine.
        lanes: One for each rank of this machine.
        team: The ranks of all machines.
        nccl: cupy's module, or its replacement in tests.
        name: NCCL's name of the group of all ranks.
        hung: As of `NcclMean`.
        outer: Outer step of the parameters, behind the mean of all machines.

    Raises:
        OptionError: The replicas differ in structure, or a rank trains on the CPU.
        CollectiveError: NCCL does not work here, or another machine did not come.
    """

    def __init__(
        self,
        replicas: Sequence[FlatTensors],
        lanes: Sequence[Lane],
        team: Team,
        nccl: Any,
        name: Any,
        hung: Callable[[CollectiveError], object] = lambda _: None,
        outer: OuterOptions | None = None,
    ) -> None:
        self._team, self.first = team, team.ranks.start
        self._own: Communicators | None = None  # of this machine alone
        # Of parameters the host tells the gate: an inner round of one rank has no mean to replace what its
        # device rejects.
        self.masks = not isinstance(replicas[0], FlatReplica)
        super().__init__(replicas, lanes, nccl, hung, outer, Members(name, team.ranks, team.world_size))
        self._is_alone = False
        if team.options.rounds > 1 and len(lanes) > 1:
            try:
                self._own = self._open(hung, None)
            except BaseException:
                self.abort()
                raise

    def _here(self, outcome: Outcome) -> Sequence[int]:
        ranks = self._team.ranks
        return [rank - ranks.start for rank in outcome.members if rank in ranks]

    def _fit(self, outcome: Outcome) -> None:
        """Nothing: the ranks of several machines end together."""

    def _group(self, outcome: Outcome) -> tuple[Communicators, Sequence[float]]:
        if outcome.inner:
            assert self._own is not None
            return self._own, [outcome.samples[rank] for rank in self._team.ranks]
        return self._comms, weights_of(outcome, self._team)

    def abort(self) -> None:
        """See `Collective.abort`."""
        for comms in filter(None, (self._comms, self._own)):
            comms.abort()

    def close(self) -> None:
        """See `Collective.close`."""
        for comms in filter(None, (self._comms, self._own)):
            comms.close()


def weights_of(outcome: Outcome, team: Team) -> Sequence[float]:
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
    hung: Callable[[CollectiveError], object],
    outer: OuterOptions | None = None,
) -> NcclMachinesMean:
    """Open NCCL on all machines, or on none.

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
        lambda: NcclMachinesMean(replicas, lanes, team, nccl, name, hung, outer),
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
    told = machines.gather("" if problem is None else str(problem))
    failed = [f"{name}: {text}" for name, text in zip(machines.names, told, strict=True) if text]
    if failed:
        for one in result:
            undo(one)
        text = "; ".join(failed)
        raise CollectiveError(f"{text}; between machines, backend='cpu' does without NCCL") from problem
    return result[0]
