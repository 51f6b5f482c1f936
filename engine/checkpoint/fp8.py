"""Weights stored in eight bits: matrices of E4M3 numbers with a scale for each block.

Folders that say `"quant_method": "fp8"` have them, as DeepSeek V3's first had: a matrix NAME of
[outputs, inputs], and NAME_scale_inv with a factor for each block of 128 x 128 numbers. At the
ends blocks are cut off.
"""

from pathlib import Path
from typing import Any

import torch

from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.hf_fields import FP8_BLOCK as BLOCK

NUMBER_KIND = "F8_E4M3"
SCALE_KINDS = ("F32", "BF16")
SCALES_SUFFIX = "_scale_inv"


def dequantise(numbers: torch.Tensor, scales: torch.Tensor, first_row: int) -> torch.Tensor:
    """Rows of a matrix from `first_row` on, float32.

    `numbers` [rows, inputs] are these rows as stored, `scales` [blocks, blocks] those of the
    whole matrix.
    """
    rows = torch.arange(first_row, first_row + numbers.shape[0]) // BLOCK
    factors = scales.float().index_select(0, rows).repeat_interleave(BLOCK, 1)
    return numbers.float().mul_(factors[:, : numbers.shape[1]])


class BlockScaled:
    """A matrix in a safetensors file with its scales. Both are slices of the file, which has no
    types. Raises `CheckpointError` unless they belong together.
    """

    def __init__(self, path: Path, name: str, numbers: Any, scales: Any) -> None:
        self.name = name
        self.shape: tuple[int, ...] = tuple(numbers.get_shape())
        self._numbers, self._scales = numbers, scales
        if numbers.get_dtype() != NUMBER_KIND:
            raise CheckpointError(
                f"{path}: tensor {name} is {numbers.get_dtype()}: must be {NUMBER_KIND}, since "
                f"there is {name}{SCALES_SUFFIX}"
            )
        found: list[int] = scales.get_shape()
        right = [-(-extent // BLOCK) for extent in self.shape]
        kind: str = scales.get_dtype()
        if len(self.shape) != 2 or found != right or kind not in SCALE_KINDS:
            raise CheckpointError(
                f"{path}: tensor {name}{SCALES_SUFFIX} is {kind} {found}: must be "
                f"{' or '.join(SCALE_KINDS)} {right}, a scale for each {BLOCK} x {BLOCK} "
                f"numbers of a matrix of {list(self.shape)}"
            )

    def fill(self, weight: torch.Tensor, piece_elements_max: int) -> None:
        """Write the matrix into `weight` of this shape, some rows at a time."""
        outputs, inputs = self.shape
        scales: torch.Tensor = self._scales[:]
        step = max(1, piece_elements_max // max(1, inputs))
        for first in range(0, outputs, step):
            end = min(first + step, outputs)
            weight[first:end].copy_(dequantise(self._numbers[first:end], scales, first))
