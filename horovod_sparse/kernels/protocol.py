"""Kernels that every device implements.

A bucket is a flat range of positions. Its gradients are *segments*, pairs (start, array): the flat array covers the
positions start .. start + len(array). Segments ascend and do not overlap. Positions between them are *held*: their
parameters take no part in the step. The *buffer* of a bucket is one contiguous array over all of its positions.

Gradients and outputs are float32, float16, bfloat16 or float64. Buffers and the values of sparse vectors are float32 or
float64, indices are int32. Kernels compute in the dtype of the buffer, and return the same bits on every device, with
any number of threads and any instruction set. Before anything is written they raise ValueError for arrays that do not
fit (dtype, shape, contiguity, bounds, 2**31 or more positions), and TypeError for arrays of another device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.kernels.types import Accumulation, Array, Indices, Moments, Segments

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Kernels(Protocol):
    """Functions of one device: the module ``kernels.cpu`` or ``kernels.cuda``."""

    # Accumulation and selection

    def accumulate(
        self, gradients: Segments, buffer: Array, scale: float = 1.0, threads: int = 1, **options: Unpack[Accumulation]
    ) -> None:
        """Set ``buffer <- scale * source``, plus the gradients inside their segments.

        Product and sum are rounded separately, as in NumPy. With scale 0 the source is ignored, even NaN.

        Args:
            gradients: Segments of any dtype, stride and alignment.
            buffer: Overwritten, float32 or float64 [n].
            scale: Finite factor, rounded to the buffer's dtype.
            threads: Number of threads; the result does not depend on it.
            **options: ``source``, ``clear`` and ``velocity``; see ``Accumulation``.
        """

    def select(
        self,
        gradients: Segments,
        buffer: Array,
        k: int,
        scale: float = 1.0,
        threads: int = 1,
        **options: Unpack[Accumulation],
    ) -> tuple[Indices, Array]:
        """Accumulate, then move the k largest magnitudes inside the segments out of the buffer, leaving zeros.

        The kernel makes one pass over gradients and buffer. Thresholds estimated from a sample decide most elements
        during the pass; the few undecided ones are ranked exactly. If the sample misleads, radix selection follows, so
        the result is exact for every input. Magnitudes are ordered by the bits of the absolute value: NaN above
        infinity above every number. Ties go to the lower position.

        Takes the arguments of ``accumulate`` and ``k``, which is capped at the number of positions inside the segments.

        Returns:
            indices: Selected positions, ascending and unique, int32 [min(k, positions inside the segments)].
            values: Values moved from these positions, in the buffer's dtype.
        """

    def select_above(
        self,
        gradients: Segments,
        buffer: Array,
        threshold: float,
        scale: float = 1.0,
        threads: int = 1,
        **options: Unpack[Accumulation],
    ) -> tuple[Indices, Array]:
        """Accumulate, then move all magnitudes inside the segments that reach the threshold out of the buffer.

        The kernel makes one pass over gradients and buffer and leaves zeros at the selected positions. Magnitudes are
        ordered as in ``select``, so NaN reaches every threshold. If memory for the entries runs out (MemoryError),
        nothing has been moved: the buffer holds the sum.

        Takes the arguments of ``accumulate``, and ``threshold``: 0 or more, rounded to the buffer's dtype; 0 selects
        everything inside the segments. Returns indices and values as ``select``.
        """

    def cut(self, indices: Indices, values: Array, k: int) -> tuple[tuple[Indices, Array], tuple[Indices, Array]]:
        """Split a sparse vector into its k largest magnitudes and the rest, in linear time; both keep the order.

        Magnitudes are ordered as in ``select``: NaN above infinity; ties go to the earlier entry.

        Args:
            indices: int32.
            values: float32 or float64, one per index.
            k: Number of entries to select, capped at the number of entries.
        """

    def take(self, gradients: Segments, buffer: Array, positions: Indices | None) -> Array:
        """Move the values at given positions out of the buffer, leaving zeros.

        Held positions keep their values in the buffer; 0 is returned for them.

        Args:
            gradients: Segments; only their ranges matter.
            buffer: Modified in place, float32 or float64 [n].
            positions: Ascending and unique, int32 [m]; None: all positions.

        Returns:
            The values, in the buffer's dtype, [m] or [n].
        """

    # Statistics of a bucket, computed before entries are selected

    def accumulate_moments(self, gradients: Segments, buffer: Array, scale: float = 1.0, threads: int = 1) -> Moments:
        """Accumulate, and compute the moments of the result inside the segments in the same pass.

        Every value is widened to float64 before it is multiplied or added. The order of the additions depends only on
        the segments, so the sums are bit-identical for any number of threads and any instruction set. The arguments are
        those of ``accumulate``.
        """

    def largest(self, gradients: Segments) -> float:
        """Return the largest magnitude of all elements of the segments, which may overlap here.

        It is 0 if there are no elements, and infinity if any element is infinite or NaN.
        """

    def block_scores(self, gradients: Segments, buffer: Array, block: int, threads: int = 1) -> NDArray[np.float64]:
        """Return the sum of squares of each block of consecutive positions, over positions inside the segments.

        Every value is widened to float64 before it is multiplied or added. The order of the additions is fixed. A block
        is summed in parts of 2048 positions (the last one may be shorter): position i of a part is added to lane i % 8
        in ascending order; lanes 4 .. 7 are added to lanes 0 .. 3, then lanes 2 and 3 to lanes 0 and 1, then lane 1 to
        lane 0; lane 0 of each part in turn is added to the score. The scores are therefore bit-identical for any number
        of threads and any instruction set.

        Args:
            gradients: Segments; only their ranges matter.
            buffer: float32 or float64 [n]; read only.
            block: Positions per block, at least 1; the last block may have fewer.
            threads: See ``accumulate``.

        Returns:
            The scores, float64 [ceil(n / block)].
        """

    def count_reaching(
        self, gradients: Segments, buffer: Array, thresholds: NDArray[np.float64], threads: int = 1
    ) -> NDArray[np.int64]:
        """Count the magnitudes inside the segments that reach each threshold, in one pass over the buffer.

        Each count is the number of elements that ``select_above`` would move if nothing were added to the buffer. NaN
        reaches every threshold.

        Args:
            gradients: Segments; only their ranges matter.
            buffer: float32 or float64 [n]; read only.
            thresholds: At most 16 thresholds, each 0 or more, in any order, float64 [m]; rounded to the buffer's dtype.
            threads: See ``accumulate``.

        Returns:
            The counts, int64 [m].
        """

    def tail(self, gradients: Segments, buffer: Array, threshold: float, threads: int = 1) -> tuple[int, float]:
        """Return number and sum of the magnitudes inside the segments that reach a threshold; NaN does.

        The sum has the bits of the ``magnitudes`` of ``accumulate_moments``, for a buffer that is zero at all other
        positions.

        Args:
            gradients: Segments; only their ranges matter.
            buffer: float32 or float64 [n]; read only.
            threshold: 0 or more; rounded to the buffer's dtype.
            threads: See ``accumulate``.
        """

    def sample(self, gradients: Segments, buffer: Array, scale: float, start: int, stride: int) -> Array:
        """Return what ``accumulate`` would write at every stride-th position inside the segments; nothing is modified.

        Args:
            gradients: Segments of any dtype, stride and alignment.
            buffer: float32 or float64 [n]; read only.
            scale: See ``accumulate``.
            start: First position, counted inside the segments; 0 or more and below the stride.
            stride: Distance between positions, counted inside the segments; at least 1.

        Returns:
            The values in ascending order of position, in the buffer's dtype.
        """

    def square_norm(self, gradients: Segments) -> float:
        """Return the sum of squares of all elements in float64; its bits do not depend on the instruction set."""

    # Sparse vectors

    def add(self, indices: Indices | None, values: Array, buffer: Array) -> None:
        """Set ``buffer[indices] += values``.

        Args:
            indices: Unique positions in the buffer; None: all positions.
            values: Values in the buffer's dtype, one per index.
            buffer: Modified in place, float32 or float64 [n].
        """

    def scatter(
        self, indices: Indices | None, values: Array, outputs: Segments, scale: float = 1.0, *, cleared: bool = False
    ) -> None:
        """Fill the outputs with zeros and write ``values * scale`` at the indices.

        Indices that no output covers are ignored. The product is rounded to the dtype of the values, then to that of
        the output (to nearest even; from float64 to 16 bits via float32).

        Args:
            indices: Ascending and unique; None: all positions.
            values: float32 or float64, one per index.
            outputs: Contiguous, writable segments of any dtype.
            scale: Factor, rounded to the dtype of the values.
            cleared: Whether the outputs already hold zeros, so that only the entries are written.
        """

    def exclude(self, indices: Indices, values: Array, others: Indices) -> tuple[Indices, Array]:
        """Return a sparse vector without its entries at given indices, in time linear in both.

        Args:
            indices: Ascending and unique, int32.
            values: float32 or float64, one per index.
            others: Indices to remove, ascending and unique, int32; they need not occur in the vector.

        Returns:
            indices: Remaining indices, ascending.
            values: Values at the remaining indices.
        """

    def places(self, indices: Indices, cuts: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return, for each of several positions, the number of indices below it, on the host.

        Args:
            indices: Ascending and unique, int32.
            cuts: A few positions, a NumPy array of int32 on every device.
        """

    def shifted(self, indices: Indices, by: int) -> Indices:
        """Return indices plus an offset; both are positions below 2**31.

        Args:
            indices: int32.
            by: The offset, which may be negative.
        """

    def gathered(self, buffer: Array, positions: Indices, factor: float) -> Array:
        """Return the values at positions of a buffer, multiplied by a factor.

        Args:
            buffer: float32 or float64; not changed.
            positions: int32, ascending and unique; on a GPU, values outside of the buffer are 0.
            factor: Factor on the values.
        """

    def reaching(self, indices: Indices, values: Array, threshold: float) -> tuple[Indices, Array]:
        """Return the entries of a sparse vector whose magnitude is at least a threshold; NaN is none.

        Args:
            indices: Ascending and unique, int32.
            values: float32 or float64, one per index.
            threshold: 0 or more, rounded to the values' dtype.

        Returns:
            indices: Indices of the entries, ascending.
            values: Values at these indices.
        """

    def merge_sum(self, vectors: Sequence[tuple[Indices, Array]], size: int) -> tuple[Indices, Array]:
        """Sum sparse vectors, in time linear in their entries.

        Values at the same index are added in the order of the vectors, ``((v0 + v1) + v2)``, so the bits of the sum
        depend on nothing else. Entries whose sum is zero remain.

        Args:
            vectors: At least one (indices, values); indices ascending and unique in [0, size), all values of one dtype.
            size: Number of positions of the bucket, less than 2**31.

        Returns:
            indices: Union of the indices, ascending.
            values: The sums, in the dtype of the vectors' values.
        """

    def count_magnitudes(self, values: Array, prefix: int, shift: int, bits: int) -> NDArray[np.int64]:
        """Return the histogram of one digit of the magnitudes: a step of radix selection, summable over ranks.

        The key of x is the bits of its absolute value, ``abs(x).view(int32)`` (31 bits) or ``.view(int64)`` (63 bits).
        Keys are ordered like magnitudes. The digit of a key is the `bits` bits above its lowest `shift` bits.

        Args:
            values: float32 or float64 [n], contiguous.
            prefix: Key whose bits above the digit select the keys to count; its other bits do not matter.
            shift: Number of bits below the digit.
            bits: Number of bits of the digit, 1 .. 16.

        Returns:
            The number of selected keys with each digit, int64 [2**bits].
        """

    # Conversion of values to wire formats and back

    def narrow(self, values: Array, name: str, out: Array | None = None) -> Array:
        """Convert values to the bytes of a message, in a format that is at most as wide as their dtype.

        Values are rounded to nearest even (float64 to bfloat16 via float32); values beyond the format's range become
        infinite. Values rounded by ``round_values`` are converted exactly.

        Args:
            values: float32 or float64 [n], contiguous.
            name: Format: "float64", "float32", "float16" or "bfloat16".
            out: Output, uint8 [n * itemsize of the format], aligned to this itemsize. None: a new array, or a view of
                the values if the format is their dtype.
        """

    def widen(self, message: Array, name: str, dtype: np.dtype[Any]) -> Array:
        """Convert a message back to values; they are a view of the message if the format is ``dtype``.

        Args:
            message: Output of ``narrow`` in the same format, aligned to the format's itemsize.
            name: Format of the message.
            dtype: Dtype of the result, float32 or float64; at least as wide as the format.
        """

    def round_values(self, values: Array, name: str) -> tuple[Array, Array]:
        """Split values into values that the format represents and the rounding errors, which sum exactly to the values.

        Values beyond the largest finite number of the format saturate at it. If the error itself would have to be
        rounded (float32 with float16: from about 2**29 on), the rounded value is 0 and the error is the value. Infinity
        and NaN are unchanged and have error 0.

        Args:
            values: float32 or float64 [n], contiguous.
            name: Format: "float64", "float32", "float16" or "bfloat16".

        Returns:
            The rounded values (the input itself if the format is its dtype) and the errors, both [n] in the dtype of
            the values.
        """

    # Compact encodings of indices and values

    def encode_indices(self, indices: Indices) -> tuple[int, NDArray[np.uint8]]:
        """Encode the gaps between ascending indices as a Rice code (Rice and Plaunt 1971) in two streams.

        As in the code of Elias and Fano, one stream holds the low bits of all gaps and the other their high bits in
        unary, so that neither is read bit by bit. Random positions take about 0.4 % more than their entropy.

        Args:
            indices: int32, ascending and unique.

        Returns:
            The number of low bits, 0 .. 24, chosen from a sample of the gaps; the code, uint8, a multiple of 8 bytes.
            The code does not contain the first index.
        """

    def decode_indices(self, coded: NDArray[np.uint8], count: int, first: int, bits: int, end: int) -> Indices:
        """Decode the output of ``encode_indices``; raise ValueError if the bytes are not a code of such indices.

        Args:
            coded: The code, uint8.
            count: Number of indices, at least 1.
            first: The first index.
            bits: Number of low bits.
            end: Exclusive upper bound of the indices.

        Returns:
            The indices, ascending and unique, int32 [count].
        """

    def check_ascending(self, parts: Sequence[Indices], end: int) -> None:
        """Raise ValueError unless the int32 indices of each part ascend in [0, end) without repeats."""

    def key_range(self, values: Array) -> tuple[int, int]:
        """Return the smallest and the largest magnitude among the finite nonzero values, which are contiguous.

        Both are the bits of a float32, to which float64 magnitudes are rounded; (0, 0) if there are no such values.
        """

    def round_levels(self, values: Array, bits: int, top: int, shift: int) -> tuple[Array, Array]:
        """Split values into their nearest levels and the rounding errors, in their dtype, which sum exactly to them.

        With ``L = 2**(bits - 1) - 1``, the magnitudes of the levels are 0 and, for i = 1 .. L, the float32 numbers
        whose bits are ``top - (L - i) * 2**shift`` (0 where that is negative). This is a piecewise linear logarithm
        with equal steps inside an octave. Every level has 23 - shift bits after the leading one. Values below half of
        the lowest level become 0, without a sign; values above the largest level become that level. If the error itself
        would have to be rounded, the level is 0 and the error is the value. Infinity and NaN are unchanged and have
        error 0.

        Args:
            values: float32 or float64, contiguous.
            bits: Bits per code, 4 or 8.
            top: Bits of the largest level, a finite float32; a multiple of ``2**shift``.
            shift: 16 .. 23; the bits of adjacent levels differ by ``2**shift``.
        """

    def encode_levels(self, values: Array, bits: int, top: int, shift: int) -> NDArray[np.uint8]:
        """Encode values rounded by ``round_levels``, with the same arguments.

        Returns:
            Codes, uint8: the index of the level, plus ``L + 1`` for negative values; ``L + 1`` alone for infinity and
            NaN. Codes of 4 bits are packed two per byte, the first in the lower half; an unused upper half is 0.
        """

    def decode_levels(
        self, codes: NDArray[np.uint8], count: int, bits: int, top: int, shift: int, dtype: np.dtype[Any]
    ) -> Array:
        """Decode the output of ``encode_levels`` for ``count`` values to float32 or float64.

        Infinity and NaN both become NaN. ``bits``, ``top`` and ``shift`` are those of ``round_levels``.
        """

    # Stochastic quantization

    def quantize(self, buffer: Array, bits: int, seed: int) -> tuple[Array, NDArray[np.float32]]:
        """Round every element at random to one of its two adjacent levels, so that the mean is the element.

        This is QSGD (Alistarh et al., NeurIPS 2017) with the largest magnitude of each block of 256 elements as its
        norm. With ``L = 2**(bits - 1) - 1``, the levels of a block are the multiples ``-L .. L`` of its unit. The unit
        is the largest magnitude / L, rounded up to ``24 - bits`` significant bits, so that every level is a float32.
        The variance of an element is at most ``unit**2 / 4``, its bias at most ``2**-24`` units, and in float32
        ``2**(bits - 26)``, by which the quotient rounds. Elements on a level are unchanged.

        A block of zeros has unit 0. A block that contains infinity or NaN, or whose unit exceeds float32, has unit NaN,
        and ``dequantize`` sets all of it to NaN. Any other unit is at least 2**-126.

        Args:
            buffer: float32 or float64 [n].
            bits: Bits per code, 4, 8 or 16.
            seed: 0 .. 2**63 - 1. The random number of an element depends only on the seed and the position. Use a new
                seed for each call; otherwise the errors accumulate.

        Returns:
            The codes, multiples stored as 0 .. 2 L, uint8 [n], or uint16 [n] with 16 bits, and the units, float32
            [ceil(n / 256)]. Codes of 4 bits are packed two per byte, [ceil(n / 2)]: byte i of a block of m elements
            holds the codes of elements i (lower half) and i + ceil(m / 2).
        """

    def dequantize(
        self,
        codes: Array,
        units: NDArray[np.float32],
        buffer: Array,
        bits: int,
        scale: float = 1.0,
        *,
        add: bool = False,
    ) -> None:
        """Set ``buffer <- scale * values``, with the values to which ``quantize`` rounded its buffer.

        Args:
            codes: Codes from ``quantize``, for a buffer of the same length.
            units: Units from ``quantize``.
            buffer: Overwritten, float32 or float64 [n].
            bits: Bits per code, 4, 8 or 16.
            scale: Finite factor. ``scale * unit`` is rounded to the buffer's dtype, then its product with each
                multiple.
            add: Add to the buffer instead of overwriting it.
        """

    # Count sketches

    def sketch_length(self, size: int, ratio: float, rows: int) -> int:
        """Return the length of a count sketch that takes about `ratio` of the memory of a bucket.

        Args:
            size: Number of positions of the bucket, less than 2**31.
            ratio: Above 0, at most 1. Small buckets exceed it: a row has at least 16 counters for every 16384
                positions.
            rows: Number of independent estimates of each element, 1, 3 or 5; the rows share the counters.

        Returns:
            The number of counters; 0 for size 0. A sketch is a float32 or float64 array of this length, with any
            content.
        """

    def sketch_update(
        self, sketch: Array, buffer: Array, delivered: Indices, rows: int, seed: int, carried: float = 0.0
    ) -> None:
        """Update a count sketch to hold a buffer that contains its estimates (Charikar, Chen and Farach-Colton 2002).

        Adds ``buffer - carried * estimates``. At delivered positions, adds the buffer alone and subtracts the
        position's share of what was carried: 1 / L of a counter that L positions share. With ``carried=0`` this adds
        the buffer. Sketches are linear: for the same size, rows and seed, the sum of two sketches is the sketch of the
        sum, up to rounding.

        An element has one counter per row, to which it is added with a random sign. Positions are divided into sections
        with separate counters, and 16 adjacent positions map to 16 adjacent counters, so that sketches are read and
        written at memory speed. For one row of w counters, ``E ||query(sketch(x)) - x||**2 <= (size / w) * ||x||**2``,
        as for the textbook sketch. Precisely, the bound is the sum of these bounds over the sections, each of which has
        counters in proportion to its positions.

        Args:
            sketch: Modified in place, float32 or float64 [a sketch_length for the buffer's size and these rows].
            buffer: Values in the sketch's dtype [n].
            delivered: Positions that have left the buffer since the query, ascending and unique, int32. There, the
                buffer holds what the exchange returned.
            rows: 1, 3 or 5.
            seed: Seed of counters and signs, 0 .. 2**63 - 1; the same for all updates and queries of the sketch.
            carried: Finite factor of the estimates in the buffer, rounded to the sketch's dtype.
        """

    def sketch_query(
        self, sketch: Array, buffer: Array, rows: int, seed: int, scale: float = 1.0, *, add: bool = False
    ) -> None:
        """Set ``buffer <- scale * estimates`` of all elements that were added to a count sketch.

        The estimate of an element is the median over the rows of its counter times its sign. It is unbiased: its mean
        over random seeds is the element. NaN and infinity are estimated as themselves, and may corrupt the estimates of
        elements that share their counters.

        Args:
            sketch: float32 or float64 [a sketch_length for the buffer's size and these rows].
            buffer: Overwritten, in the sketch's dtype [n].
            rows: See ``sketch_update``.
            seed: See ``sketch_update``.
            scale: Finite factor, rounded to the buffer's dtype.
            add: Add to the buffer instead of overwriting it.
        """
