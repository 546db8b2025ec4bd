"""Start of NCCL between several machines: on all of them, or on none.

The name of their group, which machine 0 makes, travels by `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flowdp.collective.nccl import NcclMean, load
from flowdp.collective.nccl_setup import nccl_errors
from flowdp.device.flat_parameters import FlatTensors
from flowdp.device.streams import Lane
from flowdp.errors import CollectiveError
from flowdp.network.machines import Machines
from flowdp.network.team import Team
from flowdp.options import OuterOptions

__all__ = ["open_nccl_machines"]

Result = TypeVar("Result")


def open_nccl_machines(
    replicas: Sequence[FlatTensors],
    lanes: Sequence[Lane],
    team: Team,
    outer: OuterOptions | None = None,
) -> NcclMean:
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
    told = machines.gather("" if problem is None else str(problem))
    failed = [f"{name}: {text}" for name, text in zip(machines.names, told, strict=True) if text]
    if failed:
        for opened in result:
            undo(opened)
        text = "; ".join(failed)
        raise CollectiveError(f"{text}; between machines, backend='cpu' does without NCCL") from problem
    return result[0]
