"""Cost model of the sparse allreduces, and measurements of its parameters."""
