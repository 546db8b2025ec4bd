"""The bodies of the threads."""
