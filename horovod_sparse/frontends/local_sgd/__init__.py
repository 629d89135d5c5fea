"""Front end for local SGD: several local steps between two exchanges."""
