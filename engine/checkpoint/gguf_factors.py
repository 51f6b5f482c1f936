"""The factors of a GGUF file by which the frequencies of rotation are divided."""

import numpy as np
from gguf.constants import GGMLQuantizationType

from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_header import GgufHeader

ROPE_FACTORS = "rope_freqs.weight"


def rope_factors(header: GgufHeader) -> tuple[float, ...] | None:
    """One for each pair of a head; None if the file has none."""
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.kind is not GGMLQuantizationType.F32:
        raise CheckpointError(
            f"{header.path}: tensor {ROPE_FACTORS} is of kind {tensor.kind.name}: must be F32"
        )
    count = tensor.byte_count // 4
    values = np.fromfile(header.path, "<f4", count, offset=tensor.offset)
    return tuple(float(value) for value in values)
