"""Observers of a run: callbacks and the progress bar; nothing in the engine calls them."""
