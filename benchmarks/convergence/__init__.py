"""Short trainings with every compression: `python -m benchmarks.convergence`."""
