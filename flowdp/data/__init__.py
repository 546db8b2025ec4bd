"""From a dataset to batches, in one order, each sample once."""
