"""Decisions as values: no thread, no clock, no torch."""
