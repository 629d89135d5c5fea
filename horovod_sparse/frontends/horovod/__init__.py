"""Front end that replaces Horovod's DistributedOptimizer."""
