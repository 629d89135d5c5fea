"""Front ends: what users wrap around an optimizer, a model or arrays."""
