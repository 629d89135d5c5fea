"""Communication between ranks: the ``Transport`` base class and its implementations. No rules, no cost model."""
