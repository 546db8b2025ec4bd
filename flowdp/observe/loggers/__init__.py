"""Loggers: callbacks that write the numbers of a run to files and services."""
