"""Cadences for programs and tests that go through the policies."""

from __future__ import annotations

from typing import Any

from flowdp.options import CadenceOptions

__all__ = ["cadence_for"]


def cadence_for(policy: Any, **options: Any) -> CadenceOptions | None:
    """The options under a policy that has a cadence; None under others, which refuse them."""
    return CadenceOptions(**options) if policy in ("cadence", "async") else None
