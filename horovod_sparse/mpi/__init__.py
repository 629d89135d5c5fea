"""Everything between arrays and MPI; it knows no rule and no cost model."""
