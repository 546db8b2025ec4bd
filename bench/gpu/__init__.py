"""What is checked and measured on a machine with CUDA, in one command: `python -m bench.gpu`."""
