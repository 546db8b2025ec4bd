"""The same program by flowdp and by its peers."""
