"""Two machines on one card: the paths of the bytes between machines, checked and timed on one GPU.

::

    python -m bench.machines.one_card --out one_card.json
    python -m bench.machines.one_card --device cpu        # a rehearsal, without NCCL

Each machine is a process with one rank on the same device; `NCCL_MULTI_RANK_GPU_ENABLE` allows that, from
NCCL 2.30 on. In each case both must end with the same bits; exact is compared with one rank that has the
batch of both. A process that hangs is ended, and the other cases go on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flowdp
from bench.environments import SHARED_CARD
from bench.harness import ROOT, commit, machine
from bench.machines.sides import optimizer

__all__ = ["CASES", "main", "measure"]

LIMIT_S = 60.0
INPUTS, CLASSES, BATCH = 128, 10, 256
STEPS = {"cuda": 200, "cpu": 24}

WAITING = {"overlap": False}
CADENCE = flowdp.CadenceOptions(anchor=4, max_anchor=4)

CASES: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "exact, host": ("exact", "cpu", {}),
    "exact, nccl": ("exact", "nccl", {}),
    "sync, host": ("sync", "cpu", {}),
    "sync, nccl": ("sync", "nccl", {}),
    "cadence, host": ("cadence", "cpu", WAITING),
    "cadence, host, overlap": ("cadence", "cpu", {}),
    "cadence, nccl": ("cadence", "nccl", WAITING),
    "cadence H=3, nccl": ("cadence", "nccl", {**WAITING, "rounds": 3}),
}
"""Policy, backend and `MachineOptions` of each case."""


def data() -> tuple[Tensor, Tensor]:
    """Inputs, and the classes that a random network gives them."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * 16, INPUTS, generator=draw)
    return x, (x @ torch.randn(INPUTS, CLASSES, generator=draw)).argmax(1)


def train(case: str, device: str, machines: bool | flowdp.MachineOptions) -> dict[str, Any]:
    """Train a case; returns parameters, loss, and the time of a step."""
    policy, backend, _ = CASES[case]
    stamps: list[float] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(1)
    options: dict[str, Any] = {"cadence": CADENCE} if policy == "cadence" else {}
    state = flowdp.Trainer(
        nn.Sequential(
            nn.Linear(INPUTS, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, CLASSES)
        ),
        lambda params: optimizer(params, stamps),
        loss,
        dataset=data(),
        batch_size=BATCH,
        max_steps=STEPS[torch.device(device).type],
        policy=policy,
        devices=[device],
        machines=machines,
        runtime=flowdp.RuntimeOptions(backend=backend if machines else "auto"),
        progress=False,
        **options,
    ).fit()
    late = stamps[len(stamps) // 2 :]
    gaps = [later - earlier for earlier, later in pairwise(late)]
    parameters = torch.cat([value.double().flatten() for value in state.state_dict.values()])
    return {
        "parameters": parameters,
        "steps": state.global_step,
        "loss": state.history[-1].loss if state.history else None,
        "step_ms": 1e3 * median(gaps),
    }


def work(case: str, device: str, file: str) -> None:
    """Be one machine: train, and save the result."""
    torch.set_num_threads(1)
    torch.save(train(case, device, flowdp.MachineOptions(**CASES[case][2])), file)
    sys.stdout.flush()
    os._exit(0)  # the other machine may be gone, and gloo's threads with it


def measure(case: str, device: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Train a case on two machines.

    Returns:
        The record of the case; `error` in it, where it failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, f"{rank}.pt") for rank in range(2)]
        shared = {**os.environ, **SHARED_CARD, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        running = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, "--work", case, "--device", device, "--out", str(file)],
                env={**shared, "RANK": str(rank)},
                start_new_session=True,
            )
            for rank, file in enumerate(files)
        ]
        try:
            end_s = perf_counter() + limit_s
            statuses = [process.wait(max(0.1, end_s - perf_counter())) for process in running]
        except subprocess.TimeoutExpired:
            return {"error": f"not over within {limit_s:g} s"}
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if any(statuses):
            return {"error": f"ended with statuses {statuses}"}
        first, second = (torch.load(file, weights_only=True) for file in files)
    found = {"steps": first["steps"], "loss": first["loss"], "step_ms": first["step_ms"]}
    if not torch.equal(first["parameters"], second["parameters"]):
        return {**found, "error": "the machines ended with different parameters"}
    if CASES[case][0] == "exact":
        alone = train(case, device, machines=False)
        found["from_one_device"] = float((first["parameters"] - alone["parameters"]).abs().max())
        found["one_device_ms"] = alone["step_ms"]
    return found


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases, and write the record after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="file of the record")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work:
        work(given.work, given.device, str(given.out))
    record: dict[str, Any] = {"commit": commit(), "machine": machine(), "device": given.device, "cases": {}}
    for case in given.cases:
        if given.device == "cpu" and CASES[case][1] == "nccl":
            continue
        found = record["cases"][case] = measure(case, given.device)
        print(
            f"{case:<26}",
            found.get("error") or f"{found['step_ms']:.2f} ms, loss {found['loss']}",
            flush=True,
        )
        if given.out:
            given.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return int(any("error" in found for found in record["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
