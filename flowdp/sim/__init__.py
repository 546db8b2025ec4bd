"""A virtual cluster that runs the production machines on virtual time."""
