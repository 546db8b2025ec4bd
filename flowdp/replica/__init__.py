"""One model with its optimizers and loss on one device."""
