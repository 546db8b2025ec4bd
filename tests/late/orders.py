"""Orders in which an emulated machine runs the work on its streams."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EAGER", "LATE", "Order", "first", "shuffled"]


@dataclass(frozen=True, slots=True)
class Order:
    """Choice of the work that runs before anybody waits for it.

    Attributes:
        name: Name, for messages.
        first: Role of the streams that always run as far as they can; "": all; None: none.
        chance: Probability of one more random step of the devices at each call of the host.
        seed: Seed of these steps.
    """

    name: str
    first: str | None = None
    chance: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        return self.name


LATE = Order("late")
"""Nothing runs but what the host waits for."""

EAGER = Order("eager", first="")
"""Everything runs at once, as on the CPU."""


def first(role: str) -> Order:
    """The order in which streams of one role run as far as they can, and the others late."""
    return Order(f"{role} first", first=role)


def shuffled(seed: int) -> Order:
    """The order in which random streams run at random times."""
    return Order(f"seed {seed}", chance=0.65, seed=seed)
