"""What watches a run; nothing in the engine calls it."""
