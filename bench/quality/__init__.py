"""Quality of a model that several devices have trained, beside that of one device."""
