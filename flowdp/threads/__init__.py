"""Where threads meet: the inbox and the gate."""
