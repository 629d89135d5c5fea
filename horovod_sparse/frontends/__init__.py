"""Front ends: optimizer wrappers, a DDP communication hook, and the allreduce of arrays."""
