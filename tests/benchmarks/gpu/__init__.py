"""What a GPU makes of it all, in one command: `python -m tests.benchmarks.gpu`, or `make gpu`."""
