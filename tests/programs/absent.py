"""Three ranks, of which rank 1 stays away from a call that all make together, before there was any exchange.

    absent.py DistributedOptimizer|preempted|Checkpoints|save|leaves [known]

With "known", the ranks have made something together before.
"""

from __future__ import annotations

import sys
import tempfile
import time

import horovod.torch as hvd
import torch

import horovod_sparse as hvs
from horovod_sparse.control import watch

hvd.init()
watch._PERIOD, watch._PATIENCE = 0.2, 1.5  # looks often, and waits less for an answer
what = sys.argv[1]
model = torch.nn.Linear(100, 100)
plain = torch.optim.SGD(model.parameters(), lr=0.1)
with hvs.checkpoint.on_preemption() as preempted, tempfile.TemporaryDirectory() as folder:
    if "known" in sys.argv:
        preempted()
        checkpoints = hvs.checkpoint.Checkpoints(folder)
    if hvd.rank() == 1:
        time.sleep(5 if what == "leaves" else 1000)  # until the others wait, on a loaded machine, too
        sys.exit(3)
    if what in ("DistributedOptimizer", "leaves"):
        hvs.DistributedOptimizer(plain, model.named_parameters(), hvs.Compression.topka())
    elif what == "preempted":
        preempted()
    elif what == "Checkpoints":
        hvs.checkpoint.Checkpoints(folder)
    else:
        checkpoints.save(1, model=model, optimizer=plain)
