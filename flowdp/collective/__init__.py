"""Collectives: the mean of replicas, and process groups of threads."""
