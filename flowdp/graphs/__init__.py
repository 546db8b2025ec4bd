"""Captured steps: forward and backward of a rank, recorded once and run without Python."""
