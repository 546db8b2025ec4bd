"""Timeline of a run: spans of ranks, events and samples in bounded memory; files and figures."""
