"""Kernels for CuPy arrays: CUDA C++ (csrc/cuda), compiled at first use, bit-identical to the CPU kernels.

Names, arguments and results are those of ``kernels.protocol``. Kernels run on CuPy's current stream. A
function may return before its results are complete; work on the same stream can use them without synchronization.
"""

from horovod_sparse.kernels.cuda.coding import (
    check_ascending,
    decode_indices,
    decode_levels,
    encode_indices,
    encode_levels,
    key_range,
    round_levels,
)
from horovod_sparse.kernels.cuda.convert import narrow, round_values, widen
from horovod_sparse.kernels.cuda.quantize import dequantize, quantize
from horovod_sparse.kernels.cuda.select import accumulate, cut, select, select_above, take
from horovod_sparse.kernels.cuda.sketch import sketch_length, sketch_query, sketch_update
from horovod_sparse.kernels.cuda.statistics import (
    accumulate_moments,
    block_scores,
    count_reaching,
    largest,
    sample,
    square_norm,
    tail,
)
from horovod_sparse.kernels.cuda.vectors import (
    add,
    count_magnitudes,
    exclude,
    gathered,
    merge_sum,
    places,
    reaching,
    scatter,
    shifted,
)

__all__ = [
    "accumulate",
    "accumulate_moments",
    "add",
    "block_scores",
    "check_ascending",
    "count_magnitudes",
    "count_reaching",
    "cut",
    "decode_indices",
    "decode_levels",
    "dequantize",
    "encode_indices",
    "encode_levels",
    "exclude",
    "gathered",
    "key_range",
    "largest",
    "merge_sum",
    "narrow",
    "places",
    "quantize",
    "reaching",
    "round_levels",
    "round_values",
    "sample",
    "scatter",
    "select",
    "select_above",
    "shifted",
    "sketch_length",
    "sketch_query",
    "sketch_update",
    "square_norm",
    "tail",
    "take",
    "widen",
]
