"""The front end in the place of Horovod's DistributedOptimizer."""
