"""How long a checkpoint holds the devices up: the standstill, beside the bare copy of the same tensors.

    python -m bench.micro.checkpoint
    python -m bench.micro.checkpoint --parameters 1 --pairs 15

Two CPU devices train an MLP under AdamW. The standstill is the time between the orders to put the state down
and the answer of the last rank, as the coordinator's story has it; the copy is the same tensors cloned by two
threads at once. The file is written while the devices train on, and stands beside: its time is the disk's.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from itertools import pairwise
from statistics import median

import torch
from torch import nn

import flowdp
from bench.harness import Comparison, options, report

STEPS = 3
"""Of all devices, between two checkpoints."""


def model(millions: float) -> nn.Module:
    """An MLP of so many million parameters, in eight square layers."""
    width = int((millions * 1e6 / 8) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


def standstills_ms(millions: float, checkpoints: int) -> tuple[list[float], float]:
    """How long each checkpoint held all devices up, and the median time that a file took."""
    built = model(millions)
    width = built[0].in_features  # type: ignore[index]
    data = torch.randn(64, width)
    written: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = flowdp.Trainer(
            model=built,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-6),
            loss=lambda model, batch: model(batch).square().mean(),
            dataset=data,
            batch_size=1,
            max_steps=STEPS * (checkpoints + 1),
            devices=["cpu", "cpu"],
            policy="sync",
            checkpoint=flowdp.CheckpointOptions(folder, every=STEPS, unit="step", keep_last=1),
            on_checkpoint=lambda _: written.append(time.perf_counter()),
            progress=False,
        ).start()
        run.join()
        told = [json.loads(line) for line in run._engine.story.lines()[1:]]
    starts = [event["now_ms"] for event in told if '"Capture"' in json.dumps(event["commands"])]
    ends = [event["now_ms"] for event in told if '"Save"' in json.dumps(event["commands"])]
    gaps = [(after - before) * 1e3 for before, after in pairwise(written)]
    return [end - start for start, end in zip(starts, ends, strict=True)], median(gaps)


def copy_ms(millions: float) -> float:
    """Two threads clone what two ranks put down: AdamW's two states each, and one of them the model."""
    weights = [p.detach() for p in model(millions).parameters()]
    tensors = [[*weights, *weights], [*weights, *weights, *weights]]

    def clone(mine: list[torch.Tensor]) -> None:
        torch.set_num_threads(1)
        for tensor in mine:
            tensor.clone()

    start = time.perf_counter()
    threads = [threading.Thread(target=clone, args=(mine,)) for mine in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = options(__doc__, pairs=9)
    parser.add_argument("--parameters", type=float, default=25.0, help="of the model, in millions")
    arguments = parser.parse_args()
    standing, gap_ms = standstills_ms(arguments.parameters, arguments.pairs)
    copies = [copy_ms(arguments.parameters) for _ in standing]
    label = f"{arguments.parameters:g} M parameters, AdamW"
    result = Comparison(label, "ms", ("standstill", "copy"), tuple(standing), tuple(copies))
    figures = {"between two files, ms": gap_ms}
    report("checkpoint", [result], figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
