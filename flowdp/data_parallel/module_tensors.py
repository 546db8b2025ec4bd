"""Places of a module's parameters and buffers, and a comparison of two modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flowdp.device.structure import check_same, tensor_form
from flowdp.errors import FlowdpError, OptionError

__all__ = ["ModuleTensors"]

_Location = tuple[dict[str, Tensor], str]


class ModuleTensors:
    """The places of a module's tensors: a buffer may be another object after every forward.

    Args:
        module: Its structure must stay.

    Attributes:
        modules: The module and its submodules, in order.
        names: Names of its tensors, parameters first.

    Raises:
        OptionError: A parameter or buffer has no shape yet.
    """

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self._forms = [_form(part) for part in self.modules]
        self._parameters: list[_Location] = []
        self._buffers: list[_Location] = []
        self.names: list[str] = []
        self._empty: list[_Location] = []  # parameters that are None
        self._tied: list[tuple[_Location, int]] = []  # parameters with the number of their first place
        seen: dict[Tensor, int] = {}
        for kind, locations in (("_parameters", self._parameters), ("_buffers", self._buffers)):
            for prefix, owner in module.named_modules():
                table: dict[str, Tensor] = getattr(owner, kind)
                for key, tensor in table.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if tensor is None or tensor in seen:
                        if locations is self._buffers:
                            pass  # a forward may fill it, or part it from its twin, on each rank
                        elif tensor is None:
                            self._empty.append((table, key))
                        else:
                            self._tied.append(((table, key), seen[tensor]))
                        continue
                    if is_lazy(tensor):
                        raise OptionError(f"{name!r} has no shape yet: call the model once before setup()")
                    seen[tensor] = len(self.names)
                    locations.append((table, key))
                    self.names.append(name)

    @property
    def parameters(self) -> list[Tensor]:
        """Each once."""
        return [table[key] for table, key in self._parameters]

    @property
    def buffers(self) -> list[Tensor]:
        """Each once."""
        return [table[key] for table, key in self._buffers]

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters, then the buffers."""
        return self.parameters + self.buffers

    def fit(self, index: int, like: Tensor) -> Tensor:
        """The tensor at an index of `tensors`, with the shape and dtype of another module's.

        A buffer may have grown, and is made anew.

        Raises:
            FlowdpError: It is a parameter, and has another shape or dtype.
        """
        table, key = (self._parameters + self._buffers)[index]
        mine = table[key]
        if mine.shape != like.shape or mine.dtype != like.dtype:
            if index < len(self._parameters):
                raise FlowdpError(
                    f"the model has changed since setup(): {self.names[index]!r} is {_form_of(like)} now, "
                    f"and {_form_of(mine)} on {mine.device}; call setup() again"
                )
            table[key] = torch.empty_like(like, device=mine.device)
        return table[key]

    def check_as_it_was(self) -> None:
        """Check that the module has the same parts as before; their values may have changed.

        Raises:
            FlowdpError: It has others.
        """
        parts = zip(self.modules, self._forms, strict=True)
        changed = [f"the parts of {type(part).__name__}" for part, form in parts if _form(part) != form]
        if not changed:
            now = self.parameters
            if any(table[key] is not None for table, key in self._empty) or any(p is None for p in now):
                changed = ["a parameter that is None, or was"]
            elif any(table[key] is not now[first] for (table, key), first in self._tied):
                changed = ["parameters that were tied"]
            elif len(set(map(id, now))) != len(now):
                changed = ["parameters that are tied now"]
            else:
                changed = [f"no buffer {key!r}" for table, key in self._buffers if table.get(key) is None]
        if changed:
            raise FlowdpError(
                f"the model has changed since setup(): {', '.join(changed)}; the replicas are as it was "
                "before: make all changes first, then call setup() again"
            )

    def check_like(self, first: ModuleTensors, device: torch.device) -> None:
        """Check that a replica keeps the first module's tensors, in the same order, on its device.

        Raises:
            OptionError: It does not; the message names the difference.
        """
        mine, theirs = (
            {name: _form_of(tensor) for name, tensor in zip(table.names, table.tensors, strict=True)}
            for table in (self, first)
        )
        remedy = "replica(device) must build the same model"
        check_same(mine, theirs, f"in the replica for {device}", "in the model", remedy)
        if len(self.modules) != len(first.modules):
            raise OptionError(
                f"the replica for {device} has {len(self.modules)} modules and the model has "
                f"{len(first.modules)}; replica(device) must build the same model"
            )
        for tensor in self.tensors:
            if tensor.device != device:
                raise OptionError(f"the replica for {device} has a tensor on {tensor.device}")


def _form(part: nn.Module) -> list[Any]:
    return [*part._modules.values(), *part._parameters]


def _form_of(tensor: Tensor) -> str:
    return tensor_form(tensor.dtype, tensor.shape)
