"""Logistic regression with NumPy and sparse gradients: mpirun -np 3 python -m mpi4py examples/arrays.py."""

import numpy as np
from mpi4py import MPI

import horovod_sparse as hvs

rank, ranks, features, steps = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), 500, 100
truth = np.random.default_rng(0).standard_normal(features)  # true weights, the same on all ranks
inputs = np.random.default_rng([1, rank]).standard_normal((1500, features))  # this rank's samples
labels = inputs @ truth > 0
training, test = slice(0, 1000), slice(1000, 1500)

weights = np.zeros(features)
average = hvs.SparseAllreduce(features, hvs.Compression.topka(density=0.02))
for _ in range(steps):
    predictions = 1 / (1 + np.exp(-inputs[training] @ weights))
    gradient = inputs[training].T @ (predictions - labels[training]) / 1000
    weights -= average(gradient)

accuracy = np.mean((inputs[test] @ weights > 0) == labels[test])
if rank == 0:
    dense = steps * 2 * weights.nbytes * (ranks - 1) // ranks
    print(f"accuracy {accuracy:.3f}, {average.traffic.bytes_sent:,} bytes sent, {dense:,} if dense")
