"""The goals on a GPU, each beside its floor: `python -m tests.benchmarks.gpu`, or `make bench-gpu`."""
