"""Table of a model's layers, by torchinfo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from flowdp.device.seeding import generators_kept
from flowdp.errors import OptionError

if TYPE_CHECKING:
    from torchinfo import ModelStatistics

__all__ = ["summary"]


def summary(model: nn.Module, **options: Any) -> ModelStatistics:
    """Summarise a model: its layers, their parameters and, with an input, their outputs and memory.

    ::

        print(flowdp.summary(model))
        print(flowdp.summary(model, input_size=(32, 3, 224, 224)))

    This is `torchinfo.summary` that prints nothing by itself. With an input it runs a forward in eval mode,
    which leaves the model and the random generators as they were. What a run will do is `print(trainer)`.

    Args:
        model: A module.
        options: Of torchinfo: `input_size` or `input_data`, `depth`, `col_names`, ...

    Raises:
        OptionError: torchinfo is not installed, or `model` is no module.
    """
    try:
        import torchinfo
    except ImportError as error:
        raise OptionError("summary() needs torchinfo: pip install 'flowdp[summary]'") from error
    if not isinstance(model, nn.Module):
        raise OptionError(f"summary() takes a module, not {model!r}: build it first, or print(trainer)")
    with generators_kept():  # it draws its input
        return torchinfo.summary(model, **{"verbose": 0} | options)
