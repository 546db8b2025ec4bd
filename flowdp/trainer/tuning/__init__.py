"""Numbers to train with, found by short runs: learning rate, batch sizes, policy and backend."""
