"""Everything that knows torch and Horovod."""
