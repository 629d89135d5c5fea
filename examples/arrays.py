"""Logistic regression with NumPy and sparse gradients: mpirun -np 3 python -m mpi4py examples/arrays.py."""

import numpy as np
from mpi4py import MPI

import horovod_sparse as hvs

rank, ranks, features = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), 10_000
truth = np.random.default_rng(0).standard_normal(features)  # the same on every rank
generator = np.random.default_rng([1, rank])  # every rank draws data of its own


def draw(samples: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = generator.standard_normal((samples, features)) * (generator.random(features) < 0.01)
    return inputs, inputs @ truth > 0


weights = np.zeros(features)
average = hvs.SparseAllreduce(features, hvs.Compression.topka(density=0.01))
