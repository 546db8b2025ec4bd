"""Checks and measurements for a machine with CUDA, in one command: `python -m bench.gpu`."""
