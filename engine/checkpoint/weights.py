"""Loads a checkpoint's weights into torch tensors that look the same whatever the file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tidegate.engine.checkpoint import fp8
from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.gguf_checkpoint import GgufCheckpoint
from tidegate.engine.checkpoint.gguf_factors import ROPE_FACTORS
from tidegate.engine.checkpoint.gguf_header import GgufTensor
from tidegate.engine.checkpoint.hf_checkpoint import HfCheckpoint
from tidegate.engine.checkpoint.mxfp4 import BLOCKS_SUFFIX, SCALES_SUFFIX, PackedExperts
from tidegate.engine.checkpoint.registry import Checkpoint
from tidegate.engine.checkpoint.tensor_names import HEAD

DTYPES = (torch.bfloat16, torch.float32)
# Of stored tensors, as safetensors files call them.
FLOAT_KINDS = ("F32", "F16", "BF16")
INTEGER_KINDS = ("I64", "I32")

# Weights pass through float32 in pieces of this size, never whole.
PIECE_ELEMENTS_MAX = 256 * 1024
NAMES_SHOWN_MAX = 5
# GGUF files of these have the rows of queries and keys in another order.
INTERLEAVED_ARCHITECTURES = ("llama", "smollm3")

# Called with the count of weights loaded and the count of all.
Progress = Callable[[int, int], None]

# Buffers that older folders hold beside the weights. They follow from the configuration.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """The weights by canonical name (see `ModelConfig.weight_shapes`), on the CPU, contiguous.

    They have `dtype`, which is bfloat16 or float32, but for those that the configuration keeps
    in float32. The rows of q_proj and k_proj have each head's halves one after the other, as
    rotation by halves wants them. Norm weights are what the normalised vector is multiplied
    with. `lm_head.weight` is there only if it is a tensor of its own.

    Memory: the result, and a few megabytes on top of it at any time; the file is mapped.

    Raises `CheckpointError` that names the tensors which are missing, unknown or of the wrong
    shape, and for kinds of tensor that are not supported.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is {dtype}: must be bfloat16 or float32")
    config = checkpoint.config
    source: _Source
    if isinstance(checkpoint, GgufCheckpoint):
        source = _GgufSource(checkpoint)
    else:
        source = _SafetensorsSource(checkpoint)
    shapes = config.weight_shapes()
    _check(checkpoint.path, shapes, source.shapes())
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        weight = torch.empty(shape, dtype=_dtype_of(config, name, dtype))
        source.fill(name, weight)
        weights[name] = weight
        if progress is not None:
            progress(len(weights), len(shapes))
    return weights


def _dtype_of(config: ModelConfig, name: str, dtype: torch.dtype) -> torch.dtype:
    if config.is_integer(name):
        return torch.int64
    return torch.float32 if config.is_float32(name) else dtype


class _Source(Protocol):
    """Where weights come from, by canonical name."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of the checkpoint. Unknown ones keep the name they have."""
        ...

    def fill(self, name: str, weight: torch.Tensor) -> None:
        """Write the weight, in our conventions, into `weight` of the same shape."""
        ...


class _GgufSource:
    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self.header = checkpoint.header
        self.config = checkpoint.config
        self.gguf_name = self.config.gguf_names()
        architecture = self.header.text("general.architecture")
        self.has_halves_interleaved = architecture in INTERLEAVED_ARCHITECTURES
        # Copy-on-write, as torch warns about arrays that may not be written to.
        self.data = np.memmap(checkpoint.path, dtype=np.uint8, mode="c")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        canonical = {gguf_name: name for name, gguf_name in self.gguf_name.items()}
        # The configuration has the factors already.
        ignored = {ROPE_FACTORS} | self.config.gguf_unused()
        return {
            canonical.get(name, name): tensor.shape
            for name, tensor in self.header.tensors.items()
            if name not in ignored
        }

    def fill(self, name: str, weight: torch.Tensor) -> None:
        tensor = self.header.tensors[self.gguf_name[name]]
        target = weight.unsqueeze(0) if weight.ndim == 1 else weight
        first_row = 0
        for piece in self._pieces(tensor):
            target[first_row : first_row + len(piece)].copy_(piece)
            first_row += len(piece)
        if self.has_halves_interleaved and name.rpartition(".")[0].endswith(
            ("q_proj", "k_proj")
        ):
            _join_halves(weight, self.config.attention_of(0).key_size)

    def _pieces(self, tensor: GgufTensor) -> Iterator[torch.Tensor]:
        """The tensor's rows as float32, some at a time."""
        row_elements = tensor.shape[-1]
        row_count = int(np.prod(tensor.shape[:-1]))
        end = tensor.offset + tensor.byte_count
        rows = self.data[tensor.offset : end].reshape(row_count, -1)
        step = max(1, PIECE_ELEMENTS_MAX // row_elements)
        try:
            for first in range(0, row_count, step):
                piece = gguf.dequantize(rows[first : first + step], tensor.kind)
                # The ignore: torch leaves the argument's type open.
                yield torch.from_numpy(piece)  # pyright: ignore[reportUnknownMemberType]
        except NotImplementedError:
            raise CheckpointError(
                f"{self.header.path}: tensor {tensor.name} is of kind {tensor.kind.name}, "
                "which cannot be converted"
            ) from None


def _join_halves(weight: torch.Tensor, head_dim: int) -> None:
    """Undo, in place, the order of rows of a GGUF file, where a head's two halves alternate."""
    pairs = weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
    weight.copy_(pairs.transpose(1, 2).reshape(weight.shape))


class _SafetensorsSource:
    def __init__(self, checkpoint: HfCheckpoint) -> None:
        self.path = checkpoint.path
        self.config = checkpoint.config
        # By canonical name: the file, and the tensor's name in it. The package's files have no
        # types.
        self.place_of: dict[str, tuple[Any, str]] = {}
        for path in checkpoint.weight_files:
            file = _open(path)
            for stored in file.keys():  # noqa: SIM118 - the file is no dict.
                name = self.config.canonical_name(stored)
                if name is None or self._is_ignored(name):
                    continue
                if name in self.place_of:
                    raise CheckpointError(f"{path}: tensor {stored} is in another file too")
                self.place_of[name] = (file, stored)
        self.packed: dict[str, PackedExperts | fp8.BlockScaled] = {}
        for packed in self._take_packed():
            self.packed[packed.name] = packed
        for scaled in self._take_scaled():
            self.packed[scaled.name] = scaled
        self._check_kinds()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {
            name: tuple(file.get_slice(stored).get_shape())
            for name, (file, stored) in self.place_of.items()
        }
        return plain | {name: packed.shape for name, packed in self.packed.items()}

    def fill(self, name: str, weight: torch.Tensor) -> None:
        if name in self.packed:
            self.packed[name].fill(weight, PIECE_ELEMENTS_MAX)
            return
        file, stored_name = self.place_of[name]
        stored: torch.Tensor = file.get_tensor(stored_name)
        weight.copy_(stored)
        offset = self.config.stored_offset(name)
        if offset != 0:
            weight.add_(offset)

    def _take_packed(self) -> Iterator[PackedExperts]:
        """Take out the pairs of tensors that are experts' matrices in MXFP4."""
        for blocks in [name for name in self.place_of if name.endswith(BLOCKS_SUFFIX)]:
            name = blocks.removesuffix(BLOCKS_SUFFIX)
            if name + SCALES_SUFFIX in self.place_of:
                places = (self.place_of.pop(blocks), self.place_of.pop(name + SCALES_SUFFIX))
                slices = (file.get_slice(stored) for file, stored in places)
                yield PackedExperts(self.path, name, *slices)

    def _take_scaled(self) -> Iterator[fp8.BlockScaled]:
        """Take out the pairs of tensors that are a matrix in FP8 and its scales."""
        for scales in [name for name in self.place_of if name.endswith(fp8.SCALES_SUFFIX)]:
            name = scales.removesuffix(fp8.SCALES_SUFFIX)
            if name in self.place_of:
                places = (self.place_of.pop(name), self.place_of.pop(scales))
                slices = (file.get_slice(stored) for file, stored in places)
                yield fp8.BlockScaled(self.path, name, *slices)

    def _check_kinds(self) -> None:
        """Raise `CheckpointError` for weights that are stored as no kind that can be read."""
        wanted = self.config.weight_shapes()
        for name, (file, stored) in self.place_of.items():
            if name not in wanted:
                continue
            kind: str = file.get_slice(stored).get_dtype()
            is_integer = self.config.is_integer(name)
            if kind not in (INTEGER_KINDS if is_integer else FLOAT_KINDS):
                right = "I64 or I32" if is_integer else "F32, F16 or BF16"
                raise CheckpointError(
                    f"{self.path}: tensor {stored} is {kind}: must be {right}. FP4 and FP8 are "
                    "read only as GPT-OSS and MiMo-V2 are published: convert the folder to "
                    "bfloat16"
                )

    def _is_ignored(self, name: str) -> bool:
        is_tied_head = name == HEAD and self.config.tie_embeddings
        return is_tied_head or name.endswith(IGNORED_SUFFIX)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _check(
    path: Path, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> None:
    """Raise `CheckpointError` unless exactly the wanted tensors were found."""
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    wrong = [
        f"{name} is {list(found[name])}, must be {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    faults = [
        f"{what}: {_some(names)}"
        for what, names in (
            ("missing", missing),
            ("unknown", unknown),
            ("of the wrong shape", wrong),
        )
        if names
    ]
    if faults:
        raise CheckpointError(f"{path}: tensors do not fit the model: {'; '.join(faults)}")


def _some(names: list[str]) -> str:
    hidden_count = len(names) - NAMES_SHOWN_MAX
    shown = ", ".join(names[:NAMES_SHOWN_MAX])
    return shown if hidden_count <= 0 else f"{shown} and {hidden_count} more"
