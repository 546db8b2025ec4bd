"""Weights of a model at one moment: its state_dict, and the moving average of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from flowdp.errors import OptionError

__all__ = ["Weights", "checked_average", "load_average"]


@dataclass(frozen=True)
class Weights:
    """Weights of a model at one moment.

    Attributes:
        model: The module's state_dict.
        ema: Moving average of its trained parameters, by their names; empty where there is none.
    """

    model: Mapping[str, Tensor]
    ema: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def average(self) -> dict[str, Tensor] | None:
        """The state_dict with the average in the parameters' places; None where there is none."""
        return {**self.model, **self.ema} if self.ema else None


def checked_average(average: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """Check that there is an average, and return it.

    Raises:
        OptionError: There is none.
    """
    if average is None:
        raise OptionError(
            "there is no moving average of the weights: train with callbacks=[flowdp.EMA(0.999)]"
        )
    return average


def load_average(average: Mapping[str, Tensor] | None, module: nn.Module) -> nn.Module:
    """Copy an averaged state_dict into a module of the same structure, and return it.

    Raises:
        OptionError: There is none.
    """
    module.load_state_dict(checked_average(average))
    return module
