"""Several machines: their process group, the messages between them, and the sums over all of them."""
