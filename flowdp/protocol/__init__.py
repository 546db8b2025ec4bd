"""Records that threads exchange: messages, commands, positions, and the gate's question and answer."""
