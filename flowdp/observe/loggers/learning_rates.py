"""A logger that keeps the learning rates of a run in memory."""

from __future__ import annotations

from collections.abc import Mapping

from flowdp.observe.loggers.log import Every, Log, Setting
from flowdp.observe.loggers.numbers import Number

__all__ = ["LearningRateMonitor"]

FIRST = ("lr", "round/lr")
GROUPS = ("lr_groups/", "round_lr_groups/")


class LearningRateMonitor(Log):
    """Keeps the learning rates of all parameter groups of all optimizers, for a plot.

    The loggers write these rates by themselves.

    ::

        monitor = flowdp.LearningRateMonitor()
        flowdp.Trainer(..., callbacks=[monitor]).fit()
        plt.plot(*zip(*monitor.rates["lr"].items()))

    Args:
        every: See `Log`.

    Raises:
        OptionError: `every` is something else.

    Attributes:
        rates: Name -> steps of all ranks -> learning rate of the last step before. "lr" is the first group;
            where there are several, each is also there by its name in `EpochMetrics.group_lrs`. A resumed run
            continues the curves; a new one begins anew. While the run trains, look at a copy.
    """

    skips_dev_run = False  # it writes nothing

    def __init__(self, *, every: Every = "round") -> None:
        self.rates: dict[str, dict[int, float]] = {}
        super().__init__(_Curves(self.rates), every=every)


class _Curves:
    def __init__(self, curves: dict[str, dict[int, float]]) -> None:
        self._curves = curves

    def begin(self, _settings: Mapping[str, Setting], step: int) -> None:
        for name, curve in list(self._curves.items()):
            self._curves[name] = {at: lr for at, lr in curve.items() if at <= step and step > 0}

    def log(self, numbers: Mapping[str, Number], step: int) -> None:
        for name, lr in numbers.items():
            if name in FIRST or name.startswith(GROUPS):
                self._curves.setdefault(name.partition("/")[2] or name, {})[step] = lr

    def end(self, _status: str) -> None:
        pass
