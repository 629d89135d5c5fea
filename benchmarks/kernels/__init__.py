"""Times of the kernels, compared with memory bounds."""
