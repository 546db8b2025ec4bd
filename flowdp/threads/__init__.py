"""Places where threads meet: inbox, gate, latch, crew and turns."""
