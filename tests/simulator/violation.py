"""What the judges raise."""

from __future__ import annotations

__all__ = ["Violation"]


class Violation(AssertionError):
    """A rule does not hold.

    Attributes:
        rule: Which one.
    """

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
