"""Several machines on a link that is slow on purpose."""
