"""What the divergence guard and whole steps cost on four unequal devices, with labels that say nothing.

Steps wait 4, 4, 8 and 16 ms; samples come one by one from a map-style dataset, and their labels are random:
the replicas are always far apart, and no further from round to round. Each row is the efficiency of
`Run.report()`: the throughput over the sum of the devices' own in the same run. "In the simulator" is that
run on virtual time, with step times that vary by 2 %: the cost of the first round, of whole steps, and of the
epochs' ends, without threads.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import flowdp
from bench.harness import options, report
from bench.micro.cadence import BATCH, ONE_THREAD, dataset, tiny
from bench.models import Batch, classify
from flowdp.options import Policy
from flowdp.policy.efficiency import EfficiencyReport

MS = (4.0, 4.0, 8.0, 16.0)
EPOCHS, STEPS = 4, 600
"""Steps of all devices in an epoch."""

ROWS: dict[str, tuple[Policy, bool]] = {
    "cadence": ("cadence", True),
    "cadence without the guard": ("cadence", False),
    "async": ("async", True),
    "async without the guard": ("async", False),
}


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Vectors with random labels, read one by one."""

    def __init__(self, count: int) -> None:
        self.inputs, self.labels = dataset(count)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    time.sleep(MS[flowdp.current_worker().rank] / 1e3)
    return classify(model, batch)


def measured(policy: Policy, guard: bool, rate: float) -> tuple[EfficiencyReport, int]:
    """Report of one run, and its last anchor."""
    run = flowdp.Trainer(
        model=tiny(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        loss=loss,
        dataset=Samples(STEPS * BATCH),
        per_device_batch_size=BATCH,
        epochs=EPOCHS,
        devices=["cpu"] * len(MS),
        policy=policy,
        cadence=flowdp.CadenceOptions(divergence_guard=guard),
        progress=False,
        runtime=flowdp.RuntimeOptions(tune_process=ONE_THREAD),
    ).start()
    run.join()
    return run.report(), run.history[-1].anchor


def main() -> None:
    parser = options(__doc__, pairs=3)
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate: how far replicas move apart")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for _ in range(2):  # the first run of a process warms up: the second one counts
        measured("cadence", True, arguments.rate)
    taken: dict[str, list[float]] = {row: [] for row in ROWS}
    for _ in range(arguments.pairs):
        for row, (policy, guard) in ROWS.items():
            parts, anchor = measured(policy, guard, arguments.rate)
            taken[row].append(parts.efficiency)
            losses = ", ".join(
                f"{part} {100 * cost:.1f} %"
                for part, cost in sorted(parts.parts.items(), key=lambda item: -item[1])
                if part != "training" and cost >= 0.001
            )
            print(f"{row:<28}{parts.efficiency:.3f}  anchor {anchor:>2}  {losses}", flush=True)
    for row, (policy, _) in ROWS.items():
        figures[row] = median(taken[row])
        virtual = flowdp.simulate(MS, policy=policy, sync_ms=0.2, batches=STEPS, epochs=EPOCHS, noise=0.02)
        figures[f"{row}, in the simulator"] = virtual.efficiency
        print(f"{row:<28}{min(taken[row]):.3f} to {max(taken[row]):.3f} ({virtual.efficiency:.3f} simulated)")
    report("guard", [], figures=figures, save=arguments.save)


if __name__ == "__main__":
    main()
