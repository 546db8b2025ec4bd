"""Reading of datasets: batches in one order, each sample once."""
