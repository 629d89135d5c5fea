"""The collectives as the tests build them."""

from __future__ import annotations

import pytest
from laws import SHARED, few_ranks

from horovod_sparse.collectives import COLLECTIVES

HIERARCHIES = [
    {"inner": inner, "outer": outer, "node_ranks": ranks}
    for inner, outer, ranks in [("topka", "oktopk", 2), ("gtopk", "topkdsa", 3), ("oktopk", "gtopk", None)]
]
CONFIGURATIONS = [(name, {}) for name in COLLECTIVES if name != "hierarchical"]
CONFIGURATIONS += [("oktopk", {"throttle": 1}), ("oktopk", {"tau_threshold": 1, "tau_partition": 1})]
CONFIGURATIONS += [("hierarchical", options) for options in HIERARCHIES]
every_collective = pytest.mark.parametrize(("name", "options"), CONFIGURATIONS, ids=str)
# Totals that reach the broadcast in the nodes unrounded: TopkA's must be rounded there, Dense's must not.
ROUNDING = [("hierarchical", {"inner": "gtopk", "outer": outer, "node_ranks": 2}) for outer in ("dense", "topka")]
ROUNDING += [(name, options) for name, options in CONFIGURATIONS if name != "dense"]
if not few_ranks():
    ROUNDING = [(name, {}) for name in ("topka", "topkdsa", "gtopk", "oktopk", "shared")]
every_rounding_collective = pytest.mark.parametrize(("name", "options"), ROUNDING, ids=str)
NARROWER = [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")]


def fits(name, case):
    return name != "shared" or case.pattern in SHARED
