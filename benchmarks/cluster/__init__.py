"""Benchmarks on an emulated cluster: `python -m benchmarks.cluster`."""
