"""Weights of a model at one moment, and in files for other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowdp.checkpoint.file import beside
from flowdp.errors import OptionError

__all__ = ["Weights", "checked_average", "load_average", "save_weights"]


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


def save_weights(path: str | PathLike[str], weights: Mapping[str, Any]) -> None:
    """Write a state_dict; the path has all of it, or the file from before.

    Args:
        path: Its suffix says the format: `.safetensors`, `.pt` or `.pth`.
        weights: Tensors by their names, on the CPU. Names with one memory are one tensor in the file.

    Raises:
        OptionError: The suffix is another one; or safetensors is not installed, or cannot hold a value.
        OSError: It cannot be written.
    """
    path = Path(path)
    write = WRITERS.get(path.suffix)
    if write is None:
        raise OptionError(
            f"{str(path)!r} must end with {', '.join(WRITERS)}: the suffix says the format. The folder that "
            "from_pretrained reads is written by the model itself: state.module.save_pretrained(folder)"
        )
    with beside(path) as unfinished:
        write(unfinished, weights)


class _Model(NamedTuple):
    """Stand-in for a model, of which safetensors wants the state_dict alone."""

    weights: Mapping[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.weights)


def _write_safetensors(path: Path, weights: Mapping[str, Any]) -> None:
    try:
        from safetensors.torch import save_model
    except ImportError as error:
        raise OptionError(
            "a .safetensors file needs safetensors: pip install 'flowdp[safetensors]'; or save as .pt"
        ) from error
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise OptionError(
                f"{name!r} is a {type(value).__name__}, and safetensors holds tensors alone: save as .pt"
            )
    model: Any = _Model(weights)
    save_model(model, str(path), metadata={"format": "pt"})  # transformers looks for this


def _write_torch(path: Path, weights: Mapping[str, Any]) -> None:
    torch.save(dict(weights), path)


WRITERS: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
    ".safetensors": _write_safetensors,
    ".pt": _write_torch,
    ".pth": _write_torch,
}
