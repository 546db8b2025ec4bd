"""A replica's step with an optimizer on flat memory, against one parameter by parameter.

Forward, backward, optimizer and zeroing of one rank on one compute thread, without reading batches. The
smallest model shows the cost of flat memory's checks at each step, the GPT its gain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from bench.harness import Comparison, compare, options, report, step_ms
from bench.models import Gpt, classify, images, predict_next, small_mlp, texts
from flowdp.device.flat_parameters import FlatReplica
from flowdp.device.streams import HostLane
from flowdp.device.worker_context import CurrentWorker
from flowdp.replica.learning_rate import LearningRate
from flowdp.replica.parts import ReplicaParts
from flowdp.replica.replica import Replica

CPU = torch.device("cpu")

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=1e-4),
    "SGD momentum": lambda params: optim.SGD(params, lr=1e-4, momentum=0.9),
    "AdamW": lambda params: optim.AdamW(params, lr=1e-4),
    "AdamW fused": lambda params: optim.AdamW(params, lr=1e-4, fused=True),
}


def tiny() -> nn.Module:
    """784-4-10, four parameters: hardly anything but calls."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.Linear(4, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Any, int]] = {
    "tiny": (tiny, classify, images(2), 2000),
    "mlp": (small_mlp, classify, images(32), 500),
    "gpt": (lambda: Gpt(12, 32, 4, 8, 64), predict_next, texts(1, 8, 64), 60),
}
"""Name -> (factory, loss, batch, steps of a measurement)."""


def stepper(model: str, optimizer: str, *, is_flat: bool, max_grad_norm: float | None) -> Callable[[], None]:
    """A function that takes one step."""
    make, loss, batch, _ = MODELS[model]
    module = make()
    own = OPTIMIZERS[optimizer](module.parameters())
    Replica.may_be_flat = is_flat
    parts = ReplicaParts(
        module=module,
        flat=FlatReplica(module),
        optimizers=[own],
        learning_rate=LearningRate([own]),
        lane=HostLane(CPU),
        max_grad_norm=max_grad_norm,
    )
    replica = Replica(parts, loss)
    worker = CurrentWorker(0, CPU, module, samples=len(batch[0]), sink=lambda *_: None)

    def step() -> None:
        replica.add(batch, worker)
        replica.step()
        replica.update.take_norms()

    return step


def measure(model: str, optimizer: str, max_grad_norm: float | None, pairs: int) -> Comparison:
    """Parameter by parameter against flat memory."""
    sides = {
        name: stepper(model, optimizer, is_flat=is_flat, max_grad_norm=max_grad_norm)
        for name, is_flat in (("parameters", False), ("flat", True))
    }
    steps = MODELS[model][3]
    return compare(
        f"{model}, {optimizer}{'' if max_grad_norm is None else ', clipped'}",
        {name: lambda step=step: step_ms(step, steps=steps) for name, step in sides.items()},  # type: ignore[misc]
        pairs=pairs,
    )


def main() -> None:
    parser = options(__doc__, pairs=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(model, one, None, arguments.pairs) for model in MODELS for one in OPTIMIZERS]
    results += [measure(model, "AdamW fused", 1.0, arguments.pairs) for model in MODELS]
    report("optimizer", results, save=arguments.save)


if __name__ == "__main__":
    main()
