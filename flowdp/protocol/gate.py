"""Arrival of a rank at the gate, and the one outcome that all ranks get.

Anything that all ranks must do in the same round is decided here, once, and travels in no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

__all__ = ["Arrival", "Directives", "Outcome", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a round in which one optimizer steps for all ranks (exact).

    Attributes:
        alone: One rank has taken the steps of all windows, and the others take over its replica; else the
            steps of all ranks are one step of the run, which is taken behind the gate.
        compare: The replicas are compared after the step: every rank sums the bits of its parameters.
        touched: Parameters that have gradients, see `SharedGradients.touched`; in an outcome those that the
            gradients of each member with samples touched, and None where they are not the same ones.
    """

    alone: bool = False
    compare: bool = False
    touched: bytes | None = b""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank stands in the gate.

    Attributes:
        rank: Rank index.
        round: Round number; all members must agree on it.
        global_step: Steps of all ranks before this round, as the order said.
        steps: Steps this rank has taken since the last mean.
        samples: Samples of those steps: its weight.
        left: Steps of its order that it did not take, because it was hurried.
        drift: Whether its order wants the distance from the mean measured.
        bad: Its replica has NaN or inf parameters, or its device left it out of the mean before for them: it
            weighs nothing.
        inner: The round is one of this machine's ranks alone, before one of all machines.
        earlier: Steps in the inner rounds since the last mean of all machines, and samples that their means
            hold; its machine's gate says.
        window: The window (exact); elsewhere None.
    """

    rank: int
    round: int
    global_step: int
    steps: int
    samples: int
    left: int = 0
    drift: bool = False
    bad: bool = False
    inner: bool = False
    earlier: tuple[int, int] = (0, 0)
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Directives:
    """Contents of the next outcome.

    Attributes:
        stop: End the run with this round. Stays until the run ends.
        pause: Stand still after this round. Consumed by the outcome.
        lr: New learning rate of the first parameter group. Consumed by the outcome.
        halt: Stop at a barrier after this round, for an evaluation or a checkpoint. Consumed by the
            outcome.
    """

    stop: bool = False
    pause: bool = False
    lr: float | None = None
    halt: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a round: decided once, the same object for every member.

    Attributes:
        round: Its number.
        global_step: Steps of all ranks after it; behind an inner round, those up to the last mean of all
            machines, and those of this machine's ranks since.
        members: Ranks that took part, ascending.
        steps: Steps per rank since the last mean. Shape (world_size,); 0 for ranks that left.
        samples: Samples per rank since the last mean: its weights. Of several machines, those in each one's
            mean of its own replicas (`local_weights`); `weights` has those of the machines. Shape
            (world_size,). On devices a replica that has had NaN or inf parameters in this round may weigh
            nothing all the same: the next outcome tells, or the work that the rank acknowledges.
        stop: The run ends here.
        pause: All ranks stop after it.
        lr: New learning rate, or None.
        hurried: Some member came with fewer steps than planned.
        left: Ranks that left the gate since the last outcome.
        drift: The distance from the mean is measured.
        halt: All ranks stop at a barrier after it, and wait for the coordinator's tasks.
        bad: Members that weighed nothing, as they had NaN or inf parameters in this round, or in the one
            before, as their devices told their hosts since.
        inner: The members are the ranks of one machine, which has decided it by itself. It voids nothing:
            what all machines have armed, they void together.
        earlier: Samples per rank in the inner rounds before it. Shape (world_size,); empty: there were none.
        window: The window of all members (exact); elsewhere None.
    """

    round: int
    global_step: int
    members: tuple[int, ...]
    steps: tuple[int, ...]
    samples: tuple[int, ...]
    stop: bool = False
    pause: bool = False
    lr: float | None = None
    hurried: bool = False
    left: tuple[int, ...] = ()
    drift: bool = False
    halt: bool = False
    bad: tuple[int, ...] = ()
    inner: bool = False
    earlier: tuple[int, ...] = ()
    window: Window | None = None

    @property
    def voids(self) -> bool:
        """Whether everything armed behind this round is void and planned anew."""
        if self.inner:
            return False
        return self.stop or self.pause or self.halt or self.hurried or bool(self.left) or bool(self.bad)

    @property
    def compares(self) -> bool:
        """Whether the replicas are compared after the step of this round (exact)."""
        return self.window is not None and self.window.compare

    @property
    def weights(self) -> tuple[int, ...]:
        """Samples per rank since the last mean of all machines, as far as this mean holds them.

        The weight of a machine is the sum over its ranks. Shape (world_size,).
        """
        return tuple(map(add, self.samples, self.earlier)) if self.earlier else self.samples

    def local_weights(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Weights of one machine's replicas in its own mean, which then weighs the sum of their `weights`.

        Where no healthy rank has trained since an inner mean, each of them is that mean.

        Args:
            ranks: Ranks of the machine, those that left excluded.

        Returns:
            One for each rank, all 0 where the machine has nothing to give.
        """
        samples = tuple(self.samples[rank] for rank in ranks)
        weights = self.weights
        if not any(samples) and any(weights[rank] for rank in ranks):
            return tuple(int(rank not in self.bad) for rank in ranks)
        return samples
