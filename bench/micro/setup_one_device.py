"""`setup` on one device against the same loop without it.

Both sides run one loop over the same batches, with the same settings of the process; only the module called
and the optimizer's hooks differ. `--windows` measures `epoch`, `forward_batch` and `step` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from time import perf_counter

import torch
from torch import Tensor, nn

import flowdp
from bench.harness import Comparison, compare, options, report
from bench.models import MODELS, Batch, classify, images
from flowdp.device.cores import pause_openmp
from flowdp.device.process_tuning import keep_freed_memory

WARM_UP = 20
SAMPLES = 4_096


def batches(batch_size: int) -> list[Batch]:
    x, y = images(SAMPLES)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def loop_ms(name: str, steps: int, *, is_setup: bool) -> float:
    """Milliseconds per step of a plain loop."""
    make, batch_size = MODELS[name]
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    if is_setup:
        model = flowdp.setup(model, optimizer, devices=["cpu"])
    todo = cycle(batches(batch_size))

    def step() -> None:
        loss = classify(model, next(todo))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return _ms(step, steps)


def window_ms(name: str, steps: int, *, is_setup: bool) -> float:
    """Milliseconds per step with `epoch`, `forward_batch` and `step`, or of the plain loop."""
    if not is_setup:
        return loop_ms(name, steps, is_setup=False)
    make, batch_size = MODELS[name]
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    dp = flowdp.setup(model, optimizer, devices=["cpu"], loss_fn=_classified)
    windows = iter(dp.epoch(cycle(batches(batch_size))))

    def step() -> None:
        result = dp.forward_batch(next(windows))
        dp.step()
        assert result.loss is not None
        result.loss.item()

    return _ms(step, steps)


def _classified(context: flowdp.LossContext) -> Tensor:
    return nn.functional.cross_entropy(context.output, context.batch[1])


def _ms(step: Callable[[], None], steps: int) -> float:
    for _ in range(WARM_UP):
        step()
    start = perf_counter()
    for _ in range(steps):
        step()
    return (perf_counter() - start) * 1e3 / steps


class _Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x


def own_us() -> float:
    """Microseconds of flowdp's own code in a step: a call of an empty module, and a step."""
    x, least = torch.zeros(4), []
    for is_setup in (True, False):
        model: nn.Module = _Nothing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if is_setup:
            model = flowdp.setup(model, optimizer, devices=["cpu"])

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            model(x)
            optimizer.step()

        least.append(min(_ms(step, 2_000) for _ in range(30)))
    return 1e3 * (least[0] - least[1])


def main() -> None:
    parser = options(__doc__, pairs=31)
    parser.add_argument("--windows", action="store_true", help="forward_batch instead of a call")
    parser.add_argument("--quick", action="store_true", help="few pairs")
    arguments = parser.parse_args()
    keep_freed_memory()
    pause_openmp()
    measure = window_ms if arguments.windows else loop_ms
    results: list[Comparison] = []
    for name, steps in (("mlp", 600), ("wide cnn", 40)):
        sides = {
            "setup": partial(measure, name, steps, is_setup=True),
            "plain": partial(measure, name, steps, is_setup=False),
        }
        pairs = 5 if arguments.quick else arguments.pairs
        results.append(compare(name + ", windows" * arguments.windows, sides, pairs=pairs))
    report("setup_one_device", results, figures={"own code of a step, us": own_us()}, save=arguments.save)


if __name__ == "__main__":
    main()
