"""One program per library, each as its own documentation writes a training loop."""
