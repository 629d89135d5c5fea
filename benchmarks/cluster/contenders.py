"""Names of what users would choose instead of ours; any other name is a configuration of ours."""

ALONE = "alone"  # computing, with one allreduce of 4 bytes per step instead of the gradients
HOROVOD, FP16 = "horovod", "horovod-fp16"
POWERSGD = "powersgd"  # rank 4, DistributedDataParallel over Gloo
PEERS = (ALONE, HOROVOD, FP16, POWERSGD)
