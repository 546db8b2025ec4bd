"""The pure machines: events in, orders out."""
