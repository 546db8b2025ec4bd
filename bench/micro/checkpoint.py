"""Time that a checkpoint stops the devices (its barrier), against a bare copy of the same tensors.

    python -m bench.micro.checkpoint
    python -m bench.micro.checkpoint --parameters 1 --pairs 15

Two CPU devices train an MLP with AdamW. The time at the barrier is read from the coordinator's event log,
from the orders to capture the state to the last rank's answer; each checkpoint is requested after the file
before it was written. The copy: two threads clone the same tensors at once while the run is paused, and keep
them to the end, as a checkpoint does.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import flowdp
from bench.harness import Comparison, options, report


def model(width: int) -> nn.Module:
    """An MLP of eight square layers."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))


def measure(millions: float, pairs: int) -> tuple[list[float], list[float], float]:
    """Times in ms: each checkpoint's barrier, each copy beside it, the median of a file."""
    width = int((millions * 1e6 / 8) ** 0.5)
    written = threading.Semaphore(0)
    copies, files = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = flowdp.Trainer(
            model=model(width),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-6),
            loss=lambda model, batch: model(batch).square().mean(),
            dataset=torch.randn(64, width),
            per_device_batch_size=1,
            max_steps=10**9,
            devices=["cpu", "cpu"],
            policy="sync",
            checkpoint=flowdp.CheckpointOptions(folder, every=10**9, unit="step", keep_last=1),
            callbacks=[flowdp.OnCheckpoint(lambda _: written.release())],
            progress=False,
        ).start()
        next(run.metrics("round"))  # the optimizers have their state
        for _ in range(pairs):
            start = time.perf_counter()
            run.checkpoint()
            written.acquire()
            files.append((time.perf_counter() - start) * 1e3)
            with run.paused():
                copies.append(copy_ms([replica.optimizers[0] for replica in run._engine.replicas]))
        events = run._engine.event_log.tail(10**6)
        run.stop()
        run.join()
    starts = [float(event.split()[0]) for event in events if "SaveState(" in event.partition(" => ")[2]]
    ends = [float(event.split()[0]) for event in events if "Save(" in event.partition(" => ")[2]]
    return [end - start for start, end in zip(starts, ends, strict=True)], copies, median(files)


def copy_ms(optimizers: Sequence[Optimizer]) -> float:
    """Two threads clone the state of two ranks: AdamW's two states each, and the model in one of them."""
    tensors = [
        [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        for optimizer in optimizers
    ]
    tensors[0] += optimizers[0].param_groups[0]["params"]
    made: list[list[Tensor]] = [[] for _ in tensors]

    def clone(mine: list[Tensor], kept: list[Tensor]) -> None:
        torch.set_num_threads(1)
        kept += [tensor.detach().clone() for tensor in mine]

    start = time.perf_counter()
    threads = [threading.Thread(target=clone, args=pair) for pair in zip(tensors, made, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = options(__doc__, pairs=9)
    parser.add_argument("--parameters", type=float, default=25.0, help="millions of the model's parameters")
    arguments = parser.parse_args()
    barriers, copies, file_ms = measure(arguments.parameters, arguments.pairs)
    label = f"{arguments.parameters:g} M parameters, AdamW"
    result = Comparison(label, "ms", ("standstill", "copy"), tuple(barriers), tuple(copies))
    figures = {"from the wish to the file, ms": file_ms}
    report("checkpoint", [result], figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
