"""All-gather of an FSDP2 model's parameters in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule

from horovod_sparse.control.lifecycle import process
from horovod_sparse.frontends.arguments import agree_on
from horovod_sparse.frontends.eager import eager
from horovod_sparse.frontends.fsdp.model import FSDPUnit, single_units_of
from horovod_sparse.frontends.fsdp.rounding import BITS, Blocks
from horovod_sparse.frontends.members import transport_of
from horovod_sparse.frontends.shards import shard_of

_CALL = "rounded_all_gather"


class RoundedAllGather:
    """All-gather of the parameters that FSDP gathers together, as ``set_custom_all_gather`` takes.

    Each rank sends its shards of matrices rounded in blocks, and those of vectors unchanged. It reads its own message,
    too, so that all ranks get the same bits. A message holds the scales of all blocks, their codes, and the vectors.
    Torch's operations write and read it on FSDP's stream, so that gathers overlap as those of FSDP do.

    Args:
        shapes: Elements of a rank's shard, with padding, and dimensions of each parameter, in FSDP's order.
        ranks: Number of ranks that shard them.
        bits: Bits per element of a matrix.
        inner: All-gather that sends the messages.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], ranks: int, bits: int, inner: Any) -> None:
        self._ranks, self._format, self.inner = ranks, Blocks(bits), inner
        self._widths = [width for width, _ in shapes]
        self._rounded = [dimensions > 1 for _, dimensions in shapes]
        self._blocks = [self._format.count(width) if dimensions > 1 else 0 for width, dimensions in shapes]
        self._exact = [0 if dimensions > 1 else width for width, dimensions in shapes]

    @property
    def facts(self) -> tuple[Any, ...]:
        """Facts that must be the same on every rank."""
        return (tuple(self._widths), tuple(self._rounded))

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty tensor for the parameters of all ranks."""
        tensor: torch.Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return tensor

    @eager
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> distributed.Work | None:
        """Gather the shards of all ranks, rounded.

        With a number as ``reshard_after_forward``, fewer ranks gather again what they have kept of the first gather:
        they get it unchanged.

        Args:
            output_tensor: Shards of all ranks [ranks * elements].
            input_tensor: Shards of this rank [elements].
            group: The ranks.
            async_op: Whether to return at once.

        Returns:
            What to wait for if ``async_op``, else None.
        """
        if group.size() != self._ranks:
            kept: distributed.Work | None = self.inner(output_tensor, input_tensor, group, async_op)
            return kept
        self._require_known(input_tensor)
        parts = list(self._parts(input_tensor))
        size = self._ranks * sum(part.numel() for part in parts)
        messages = self.inner.allocate((size,), dtype=torch.uint8, device=input_tensor.device)
        rows = messages.view(self._ranks, -1)
        work = self.inner(messages, torch.cat(parts, out=rows[group.rank()]), group, async_op)
        if work is not None:
            return _Arrival(work, lambda: self._read(rows, output_tensor))
        self._read(rows, output_tensor)
        return None

    def _require_known(self, shards: torch.Tensor) -> None:
        if shards.numel() != sum(self._widths) or not shards.is_floating_point():
            raise RuntimeError(
                f"rank {distributed.get_rank()}: FSDP gathers {shards.numel()} elements of {shards.dtype}, but there "
                f"were {sum(self._widths)} floating-point numbers of one dtype when {_CALL} was called: call it again "
                "after the parameters were changed"
            )

    def _parts(self, shards: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the parts of this rank's message, uint8."""
        split = torch.split(shards, self._widths)
        filled = []
        for part, blocks in zip(split, self._blocks, strict=True):
            if blocks:
                filled += [part, part.new_zeros(blocks * self._format.size - part.numel())]
        if filled:
            scales, codes = self._format.write(torch.cat(filled).view(-1, self._format.size))
            yield from (scales.view(-1), codes.view(-1))
        yield from (part.view(torch.uint8) for part, exact in zip(split, self._exact, strict=True) if exact)

    def _read(self, rows: torch.Tensor, output: torch.Tensor) -> None:
        """Write the parameters of all ranks from their messages."""
        of_scales, of_codes, of_values = self._format.scale_bytes, self._format.width, output.dtype.itemsize
        blocks, exact = sum(self._blocks), sum(self._exact)
        scales, codes, unchanged = torch.split(rows, [of_scales * blocks, of_codes * blocks, of_values * exact], 1)
        of_each = zip(
            torch.split(output.view(self._ranks, -1), self._widths, 1),
            self._rounded,
            torch.split(scales, [of_scales * count for count in self._blocks], 1),
            torch.split(codes, [of_codes * count for count in self._blocks], 1),
            torch.split(unchanged, [of_values * count for count in self._exact], 1),
            strict=True,
        )
        for target, rounded, its_scales, its_codes, its_values in of_each:
            if rounded:
                target.copy_(self._format.read(its_scales, its_codes, output.dtype)[:, : target.shape[1]])
            else:
                target.view(torch.uint8).copy_(its_values)


class _Arrival(distributed.Work):
    """Gather in flight, after which parameters are written.

    Args:
        work: The gather.
        finish: Writes them.
    """

    def __init__(self, work: distributed.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._finish = work, finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the ranks, and write the parameters; on a GPU, the current stream does."""
        done: bool = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._finish()
        return done


def rounded_all_gather(model: nn.Module, bits: int = 8) -> None:
    """Gather the parameters of an FSDP2 model in 8 or 4 bits.

    From now on, each rank sends its shards of matrices, and of parameters with more dimensions, rounded in blocks.
    Vectors are sent unchanged. Forward and backward pass see the rounded parameters, on all ranks the same. The shards
    that the optimizer updates, and that checkpoints hold, are not rounded.

    May be combined with ``sparse_reduce_scatter`` and ``sparse_all_reduce``, and called again with other bits. A
    collective call of the ranks that shard the model, which compares model and bits.

    Args:
        model: The model, after ``fully_shard`` over a mesh of any dimensions.
        bits: Bits per element, 8 or 4, plus 16 for each block of 256 or 64.

    Raises:
        ValueError: The model is not sharded by FSDP2, or over several meshes in one module; parameters of a unit are
            gathered by their class, in several dtypes, or as no floating-point numbers; torch is too old; ``bits`` is
            neither 8 nor 4; or the ranks differ.
    """
    gathers: list[tuple[FSDPModule, RoundedAllGather]] = []

    def facts() -> dict[str, Any]:
        if bits not in BITS:
            raise ValueError(f"bits is {bits!r}, and {_CALL} supports {' and '.join(map(str, BITS))}")
        gathers[:] = [(unit.module, _gather_of(unit, bits)) for unit in units]
        return {"bits": bits, "unit": tuple(gather.facts for _, gather in gathers)}

    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise ValueError(f"{_CALL} needs FSDPModule.set_custom_all_gather of torch 2.9, not {torch.__version__}")
    units = [unit for unit in single_units_of(model, _CALL) if hasattr(unit.record.mesh_info, "shard_process_group")]
    for group in dict.fromkeys(unit.record.mesh_info.shard_process_group for unit in units):
        transport = transport_of(group)
        assert transport is not None
        with process.communicating(f"{_CALL}()", transport):
            agree_on(transport, facts)
    for module, gather in gathers:
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]


def _gather_of(unit: FSDPUnit, bits: int) -> RoundedAllGather:
    """Return the all-gather of a unit; raise ValueError if it does not gather floating-point numbers of one dtype."""
    name, _, record = unit
    parameters = [sharded.sharded_param for sharded in record.fsdp_params]
    if any(hasattr(shard_of(p), "fsdp_pre_all_gather") for p in parameters):
        raise ValueError(f"parameters of {name} are gathered by their class, as in float8: {_CALL} cannot round them")
    dtypes = {(p.is_floating_point() and record.mp_policy.param_dtype) or p.dtype for p in parameters}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(
            f"{name} has parameters that are gathered in {' and '.join(sorted(map(str, dtypes)))}, and {_CALL} needs "
            "floating-point numbers of one dtype: shard modules of other dtypes by themselves"
        )
    shapes = [
        (sharded.padded_sharded_param_size.numel(), p.ndim)
        for sharded, p in zip(record.fsdp_params, parameters, strict=True)
    ]
    inner = record._all_gather_comm
    inner = inner.inner if isinstance(inner, RoundedAllGather) else inner
    return RoundedAllGather(shapes, record.mesh_info.shard_process_group.size(), bits, inner)
