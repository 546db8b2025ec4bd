"""The time limit of all tests that wait."""

from __future__ import annotations

__all__ = ["HANG_S"]

HANG_S = 300.0
"""Seconds after which what a test waits for has hung: minutes, so that no busy machine is taken for a hang.

Half of a whole test's limit in `pyproject.toml`, so that the wait fails first and says what it waited for.
"""
