"""Times of the kernels beside the bounds that memory sets."""
