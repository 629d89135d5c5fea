"""Short training runs with every compression: `python -m benchmarks.convergence`."""
