"""The ranks of a run, and the machines that hold them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from flowdp.network.machines import Machines, check_world
from flowdp.options import MachineOptions

__all__ = ["Team"]


@dataclass(frozen=True)
class Team:
    """The ranks of a run: machine 0 has the first ones, machine 1 those behind them, and so on.

    Attributes:
        sizes: Ranks of each machine. Shape (machines,).
        machines: The machines; None: this process trains alone.
        options: Options of several machines.
        world: The process group that this process was in when the team was found; None: it was alone.
        trains_alone: The process trains alone by `machines=False`, whatever group it is in.
    """

    sizes: tuple[int, ...]
    machines: Machines | None = None
    options: MachineOptions = field(default_factory=MachineOptions)
    world: object = field(default=None, compare=False, repr=False)
    trains_alone: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks of all machines."""
        return sum(self.sizes)

    @property
    def index(self) -> int:
        """Number of this machine."""
        return 0 if self.machines is None else self.machines.index

    @property
    def leads(self) -> bool:
        """Whether this machine decides for all, and writes the files."""
        return self.index == 0

    @property
    def ranks(self) -> range:
        """Ranks of this machine."""
        return self.of(self.index)

    @property
    def is_spread(self) -> bool:
        """Whether there are other machines."""
        return self.machines is not None

    def check(self) -> None:
        """Check that the machines of now are those with which this team was found.

        Raises:
            OptionError: They are not, so that a run would wait for others, or train without them.
        """
        if not self.trains_alone:
            check_world(self.world)

    def telling(self) -> AbstractContextManager[None]:
        """Context that tells the other machines an error inside; see `Machines.telling`."""
        return nullcontext() if self.machines is None else self.machines.telling()

    def starting(self) -> AbstractContextManager[None]:
        """Context of the start of a run; see `Machines.starting`."""
        return nullcontext() if self.machines is None else self.machines.starting()

    def of(self, machine: int) -> range:
        """Ranks of a machine."""
        first = sum(self.sizes[:machine])
        return range(first, first + self.sizes[machine])

    def machine_of(self, rank: int) -> int:
        """The machine that holds a rank."""
        return next(machine for machine in range(len(self.sizes)) if rank in self.of(machine))
