"""Values with tensors, sent from one machine to another over a group of their own."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowdp.errors import MachineLostError
from flowdp.network.machines import Machines
from flowdp.policy.formats import format_error

__all__ = ["Transfer"]


class Transfer:
    """Values from machine to machine, beside all other messages. Each machine opens one, at the same place.

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
        """Send a value to another machine, which calls `receive`; any that `torch.save` takes.

        Raises:
            MachineLostError: The machine was lost, or does not come.
        """
        content = io.BytesIO()
        torch.save(value, content)
        data = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([len(data)]), machine, group=self._group)
            dist.send(data, machine, group=self._group)
        except Exception as error:
            raise self._lost("sending", "to", machine, error) from error

    def receive(self, machine: int) -> Any:
        """Receive the value that another machine sends.

        Raises:
            MachineLostError: The machine was lost, or sends nothing in time.
        """
        try:
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, machine, group=self._group)
            data: Tensor = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(data, machine, group=self._group)
        except Exception as error:
            raise self._lost("receiving", "from", machine, error) from error
        return torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=False)

    def _lost(self, doing: str, way: str, machine: int, error: Exception) -> MachineLostError:
        return MachineLostError(
            f"{doing} states {way} {self.name(machine)} failed: it was lost, or did not come within "
            f"{self._machines.timeout_s:g} s: {format_error(error)}"
        )
