"""Limits of an epoch: a part of its batches, for a short look at a run before the long one."""

from __future__ import annotations

from dataclasses import dataclass

from flowdp.errors import OptionError
from flowdp.validators import is_int

__all__ = ["UNLIMITED", "Limit", "check_limit"]


@dataclass(frozen=True, slots=True)
class Limit:
    """The part of each epoch that is read: its first batches.

    Attributes:
        batches: How many at most (int), or which fraction of them, rounded down, but one at least (float).
            None: all.
        samples: Most samples; None: no limit.
        is_fixed: The samples are not shuffled, so that each epoch has the same ones.
    """

    batches: int | float | None = None
    samples: int | None = None
    is_fixed: bool = False

    def of(self, batches: int) -> int:
        """Batches that are left of an epoch of so many."""
        if self.batches is None:
            return batches
        if is_int(self.batches):
            return min(self.batches, batches)
        return min(batches, max(1, int(self.batches * batches)))

    @property
    def of_unknown(self) -> int | None:
        """Batches that are left of an epoch whose length is not known; None: all.

        Raises:
            OptionError: It is a fraction.
        """
        if self.batches is None or is_int(self.batches):
            return self.batches
        raise OptionError(
            f"limit_batches={self.batches!r} is a fraction, and an IterableDataset has no length: "
            "give a number of batches"
        )


UNLIMITED = Limit()
"""All of each epoch."""


def check_limit(name: str, value: object) -> Limit | None:
    """Check a number of batches, or a fraction of them; None passes.

    Raises:
        OptionError: It is neither.
    """
    if value is None:
        return None
    if (is_int(value) and value >= 1) or (isinstance(value, float) and 0 < value <= 1):
        return Limit(value)
    raise OptionError(
        f"{name} must be a number of batches of at least 1 (an int), or a fraction of them above 0 and up to "
        f"1.0 (a float), not {value!r}"
    )
