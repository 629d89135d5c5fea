"""Measurements on an emulated cluster: `python -m benchmarks.cluster`."""
