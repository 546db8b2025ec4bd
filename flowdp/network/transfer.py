"""Values with tensors, sent from one machine to another over a group of their own."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowdp.device.copies import dense_strides
from flowdp.errors import MachineLostError
from flowdp.network.machines import Machines
from flowdp.policy.formats import format_error

__all__ = ["Transfer"]

LENGTH = 8
"""Bytes that say how long the description of a value is."""


class Transfer:
    """Values from machine to machine, beside all other messages. Each machine opens one, at the same place.

    Each tensor travels by itself, from its own memory to that of the received one, so that no value is there
    twice: the states of optimizers are large.

    Args:
        machines: Machines of the job.

    Raises:
        MachineLostError: Not all machines came here in time.

    Threads:
        One for each direction.
    """

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._group = machines.open_group()

    def close(self) -> None:
        """Give the group back, when nothing travels any more; once."""
        self._machines.close_group(self._group)
        del self._group  # the last reference holds its sockets

    @property
    def others(self) -> range:
        """All machines but the one that leads."""
        return range(1, self._machines.count)

    def name(self, machine: int) -> str:
        """Name of a machine for people."""
        return self._machines.names[machine]

    def send(self, value: Any, machine: int) -> None:
        """Send a value to another machine, which calls `receive`; any that can be pickled.

        Raises:
            MachineLostError: The machine was lost, or does not come.
        """
        content = io.BytesIO()
        pickler = _Pickler(content)
        pickler.dump(value)
        described = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
        length = torch.frombuffer(bytearray(described.numel().to_bytes(LENGTH, "little")), dtype=torch.uint8)
        try:
            for part in (length, described, *pickler.tensors):
                dist.send(_as_bytes(part), machine, group=self._group)
        except Exception as error:
            raise self._lost("sending", "to", machine, error) from error

    def receive(self, machine: int) -> Any:
        """Receive the value that another machine sends.

        Raises:
            MachineLostError: The machine was lost, or sends nothing in time.
        """
        try:
            length = torch.empty(LENGTH, dtype=torch.uint8)
            dist.recv(length, machine, group=self._group)
            content = torch.empty(int.from_bytes(length.numpy().tobytes(), "little"), dtype=torch.uint8)
            dist.recv(content, machine, group=self._group)
            unpickler = _Unpickler(io.BytesIO(content.numpy().tobytes()))
            value = unpickler.load()
            for tensor in unpickler.tensors:
                dist.recv(_as_bytes(tensor), machine, group=self._group)
        except Exception as error:
            raise self._lost("receiving", "from", machine, error) from error
        return value

    def _lost(self, doing: str, way: str, machine: int, error: Exception) -> MachineLostError:
        return MachineLostError(
            f"{doing} states {way} {self.name(machine)} failed: it was lost, or did not come within "
            f"{self._machines.timeout_s:g} s: {format_error(error)}"
        )


class _Pickler(pickle.Pickler):
    """A pickler that leaves out the elements of tensors, which are sent behind it.

    Attributes:
        tensors: These tensors, dense and on the host.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        """Place, dtype, shape and strides of a tensor that travels by itself; None: it is pickled."""
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized:
            return None
        if not value.numel():
            return None
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self.tensors)
            self.tensors.append(_dense(value.detach().cpu()))
        dense = self.tensors[place]
        return place, value.dtype, tuple(value.shape), dense.stride()


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes room for those tensors.

    Attributes:
        tensors: In the order in which they come.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, key: Any) -> Tensor:
        """A tensor whose elements are still to come."""
        place: int
        place, dtype, shape, strides = key
        if place == len(self.tensors):
            self.tensors.append(torch.empty_strided(shape, strides, dtype=dtype))
        return self.tensors[place]


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, with memory of its own without gaps; channels_last stays."""
    dense = dense_strides(tensor)
    if tensor.stride() == dense and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    copied: Tensor = torch.empty_strided(tensor.shape, dense, dtype=tensor.dtype)
    return copied.copy_(tensor)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor, in its own order, as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
