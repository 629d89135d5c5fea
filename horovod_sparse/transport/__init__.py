"""Communication among ranks: the ``Transport`` protocol and its implementations. Knows no rule and no cost model."""
