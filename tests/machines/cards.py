"""Machines whose ranks run on fake streams, as CUDA devices would run them: NCCL is a fake that really sums.

Run as a script with a backend, it trains cases of `exact` and `rounds`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import flowdp
from flowdp.collective import nccl, select
from flowdp.collective.nccl import NcclMean, open_nccl_machines
from flowdp.collective.select import open_collective
from flowdp.device.streams import Lane
from flowdp.engine import build
from flowdp.trainer import trainer
from tests.collective.fake_nccl import FakeNcclOfMachines
from tests.data.cards import Card, put_on_streams
from tests.machines import exact, rounds
from tests.machines.launch import report

DEVICES = (2, 1)
EXACT = ("plain", "weights", "sick")
WAITING = ("sync", "cadence, 1 rounds, waiting, full", "cadence, 5 rounds, waiting, full")
ROUNDS: Mapping[str, Sequence[str]] = {
    "auto": (*WAITING, "sync in bf16", "cadence, 5 rounds, overlap, full"),
    "nccl": WAITING,
}
"""Cases of `rounds` by backend; "auto" is the hosts' memory here, as no device is a CUDA device."""


put: Callable[[object, str, object], None] = setattr


def main(backend: Any) -> None:
    dist.init_process_group("gloo")
    card, made = Card(), list[type]()
    put_on_streams(card)
    machine = dist.get_rank()

    def fake_nccl(replicas: Any, lanes: Sequence[Lane], team: Any, *more: Any) -> NcclMean:
        fake = FakeNcclOfMachines(card, lanes, team.ranks, team.world_size)
        put(nccl, "load", lambda: fake)
        return open_nccl_machines(replicas, lanes, team, *more)

    def noted(*given: Any, **options: Any) -> Any:
        made.append(type(opened := open_collective(*given, **options)))
        return opened

    put(trainer, "check_backend", lambda *_: None)  # which sees that the devices are none of CUDA's
    put(select, "open_nccl_machines", fake_nccl)
    put(build, "open_collective", noted)
    runtime = flowdp.RuntimeOptions(backend=backend)
    exact.main(EXACT, runtime=runtime)
    for case in ROUNDS[backend]:
        rounds.train(case, DEVICES[machine], {**rounds.CASES[case], "runtime": runtime})
    report("over", races=card.races[:3], collectives=[one.__name__ for one in made])


if __name__ == "__main__":
    assert "RANK" in os.environ, "started by a Job"
    torch.set_num_threads(1)
    main(sys.argv[1])
