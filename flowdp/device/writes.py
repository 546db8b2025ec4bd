"""Writes of a step to tensors that it has not made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flowdp.device.dispatch import RankMode

__all__ = ["WritesNoted", "storage_of"]


class WritesNoted(RankMode):
    """Mode that notes the first write to each tensor that was there before, and can undo it.

    Only operations whose schema says that they write are seen: `native_batch_norm` and its like do not say
    that they update buffers.

    Args:
        known: Tensors that may be written to, and need not be noted.

    Attributes:
        found: The others, as they are.

    Threads: the one that enters it.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._own = {storage_of(tensor) for tensor in known if tensor.layout is torch.strided}

    def undo(self) -> None:
        """Give the tensors found the values that they had, outside of the mode."""
        for tensor, value in zip(self.found, self._kept, strict=True):
            tensor.copy_(value)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        given = kwargs or {}
        for place, name in _written(func):
            value = args[place] if place < len(args) else given.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    self._note(tensor)
        made = func(*args, **given)
        for tensor in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and not _is_view(func):
                self._own.add(storage_of(tensor))
        return made

    def _note(self, tensor: Tensor) -> None:
        if storage_of(tensor) not in self._own:
            self._own.add(storage_of(tensor))
            # Later writes may go to other parts of the same memory.
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
            self.found.append(whole)
            self._kept.append(whole.clone())


def storage_of(tensor: Tensor) -> int:
    """Address of a tensor's storage: that of a fake one, too."""
    return int(tensor.untyped_storage()._cdata)


@cache
def _is_view(func: Any) -> bool:
    """Whether a result may lie in memory that was there before."""
    if func is torch.ops.aten.lift_fresh.default:  # of `torch.tensor(...)`
        return False
    return any(one.alias_info is not None for one in func._schema.returns)


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Place and name of each argument that an operation writes to."""
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
