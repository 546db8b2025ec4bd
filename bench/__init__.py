"""Benchmarks: two sides measured in turn, in one run."""
