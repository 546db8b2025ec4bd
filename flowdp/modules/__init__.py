"""The user's module: copies of it, its hooks and attributes, and comparisons of its outputs."""
