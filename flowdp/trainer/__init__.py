"""The Trainer: its options, a run and its result, and what is found with short runs."""
