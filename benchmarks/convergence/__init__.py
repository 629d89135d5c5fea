"""Small trainings with every compression: `python -m benchmarks.convergence`."""
