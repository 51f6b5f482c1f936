"""Weights stored as MXFP4: blocks of numbers of four bits that share a scale.

Source of the format: OCP Microscaling Formats (MX) specification 1.0. A number is E2M1 (sign,
two bits of exponent, one of mantissa); a scale is E8M0, a power of two with a bias of 127.
"""

from pathlib import Path
from typing import Any

import torch

from tidegate.engine.checkpoint.errors import CheckpointError

BLOCK_BYTES = 16  # 32 numbers, of which the low half of a byte is the first.
SCALE_BIAS = 127
BLOCKS_SUFFIX = "_blocks"
SCALES_SUFFIX = "_scales"

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[rows, numbers], float32, from `blocks` [rows, blocks, BLOCK_BYTES] and `scales`
    [rows, blocks], both uint8.
    """
    codes = torch.stack([blocks & 0x0F, blocks >> 4], -1).flatten(-2)
    numbers = _NUMBERS[codes.long()]
    exponents = scales.int().sub_(SCALE_BIAS).unsqueeze(-1)
    return torch.ldexp(numbers, exponents).flatten(1)


class PackedExperts:
    """Experts' matrices in a safetensors file as tensors NAME_blocks [experts, outputs, blocks,
    BLOCK_BYTES] and NAME_scales [experts, outputs, blocks].

    `blocks` and `scales` are slices of the file, which has no types. Raises `CheckpointError`
    unless they belong together.
    """

    def __init__(self, path: Path, name: str, blocks: Any, scales: Any) -> None:
        self.name = name
        self._blocks, self._scales = blocks, scales
        shape: tuple[int, ...] = tuple(blocks.get_shape())
        for suffix, part, right in (
            (BLOCKS_SUFFIX, blocks, (*shape[:3], BLOCK_BYTES)),
            (SCALES_SUFFIX, scales, shape[:3]),
        ):
            found: list[int] = part.get_shape()
            if part.get_dtype() != "U8" or len(shape) != 4 or tuple(found) != right:
                raise CheckpointError(
                    f"{path}: tensor {name}{suffix} is {part.get_dtype()} {found}: must be U8 "
                    f"{list(right)}, {BLOCK_BYTES} bytes and a scale for each block of each "
                    "output of each expert"
                )
        self._experts, self._outputs, block_count = shape[:3]
        self._inputs = 2 * BLOCK_BYTES * block_count

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, inputs, outputs], as these matrices are where they are not packed."""
        return self._experts, self._inputs, self._outputs

    def fill(self, weight: torch.Tensor, piece_elements_max: int) -> None:
        """Write the matrices into `weight` of this shape, some numbers at a time."""
        step = max(1, piece_elements_max // max(1, self._inputs))
        for expert in range(self._experts):
            for first in range(0, self._outputs, step):
                part = slice(first, min(first + step, self._outputs))
                piece = dequantise(self._blocks[expert, part], self._scales[expert, part])
                weight[expert, :, part].copy_(piece.t())
