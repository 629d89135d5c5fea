"""Values rounded in blocks: integers of 8 or 4 bits, times a scale for each block."""

from __future__ import annotations

import torch

BITS = (8, 4)
_SCALE = torch.bfloat16


class Blocks:
    """Format that rounds values to the nearest of equidistant levels between minus and plus the block's largest one.

    Trained parameters are spread like normal numbers, for which equidistant levels leave a quarter of the error of
    log8, and half that of log4. A scale has 8 significant bits, so that level times scale is exact in float32: every
    device reads the same bits. Blocks of ZeRO++ (Wang et al., "ZeRO++: Extremely Efficient Collective Communication for
    Giant Model Training", 2023), with nearest rounding.

    Args:
        bits: Bits per value, 8 or 4.

    Attributes:
        size: Number of values of a block.
        width: Bytes of its codes.
    """

    scale_bytes = _SCALE.itemsize

    def __init__(self, bits: int) -> None:
        self.bits, self.size = bits, 256 if bits == 8 else 64
        self.width = self.size * bits // 8
        self._most = 2 ** (bits - 1) - 1

    def count(self, values: int) -> int:
        """Return the number of blocks of some values, the last of which may be filled up."""
        return -(-values // self.size)

    def write(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and codes of complete blocks, uint8 [blocks, bytes].

        Args:
            values: Floating-point numbers [blocks, size]. Blocks with infinity or NaN are read as such.
        """
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        scales = (values.abs().amax(1, keepdim=True) / self._most).to(_SCALE)
        levels = values / scales.to(values.dtype)  # NaN in a block of zeros, where any code is read as 0
        codes = levels.round().clamp(-self._most, self._most).to(torch.int8)
        if self.bits == 4:
            low, high = (codes + 8).view(torch.uint8).chunk(2, dim=1)
            return scales.view(torch.uint8), low | high << 4
        return scales.view(torch.uint8), codes.view(torch.uint8)

    def read(self, scales: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of blocks from their bytes.

        Args:
            scales: uint8 [..., blocks * scale_bytes].
            codes: uint8 [..., blocks * width].
            dtype: Dtype of the result, [..., blocks * size]; float16 is returned as float32.
        """
        codes = codes.view(*codes.shape[:-1], -1, self.width)
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=-1).view(torch.int8) - 8
        scale = scales.view(_SCALE).unsqueeze(-1).to(torch.promote_types(dtype, _SCALE))
        return (codes.view(torch.int8) * scale).flatten(-2)
