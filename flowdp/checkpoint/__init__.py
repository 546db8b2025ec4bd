"""Checkpoints: the state of each rank, the file, the folder, and resuming."""
