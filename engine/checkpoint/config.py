"""`ModelConfig`: what all families' configurations share, whatever file they came from."""

import math
from typing import ClassVar, Literal

import msgspec

from tidegate.engine.checkpoint.errors import CheckpointError

Family = Literal["llama", "gemma3", "gemma4", "gpt_oss", "mimo_v2", "deepseek_v4"]
FAMILIES: tuple[Family, ...] = (
    "llama",
    "gemma3",
    "gemma4",
    "gpt_oss",
    "mimo_v2",
    "deepseek_v4",
)

LAYER_COUNT_MAX = 1024
COUNT_MAX = 2**31 - 1  # Of every other size: far above any model, far below trouble.

Shapes = dict[str, tuple[int, ...]]


class AttentionShape(msgspec.Struct, frozen=True, kw_only=True):
    """The heads of one layer's attention. Raises `CheckpointError` as `ModelConfig` does."""

    head_count: int  # A multiple of `kv_head_count`.
    kv_head_count: int
    key_size: int  # Of a query head too. Even: rotary embeddings turn pairs.
    value_size: int

    def __post_init__(self) -> None:
        for field in ("head_count", "kv_head_count", "key_size", "value_size"):
            require_count(field, getattr(self, field))
        require(
            self.head_count % self.kv_head_count == 0,
            "head_count",
            self.head_count,
            f"must be a multiple of kv_head_count, which is {self.kv_head_count}",
        )
        require(self.key_size % 2 == 0, "key_size", self.key_size, "must be even")

    @property
    def query_width(self) -> int:
        """Numbers of all query heads of a token."""
        return self.head_count * self.key_size

    @property
    def key_width(self) -> int:
        return self.kv_head_count * self.key_size

    @property
    def value_width(self) -> int:
        return self.kv_head_count * self.value_size

    @property
    def output_width(self) -> int:
        """Numbers that attention gives for a token, before its output projection."""
        return self.head_count * self.value_size


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What workers, cards, pools and plans need to know of a model besides its weights.

    Each family has a subclass with what only its code needs. A value that breaks a rule raises
    `CheckpointError`, which names the field, when the struct is made. So whoever holds one may
    rely on them.
    """

    family: ClassVar[Family]

    name: str
    vocab_size: int
    hidden_size: int
    layer_count: int
    norm_eps: float
    window: int | None  # Tokens a window layer's query reads: itself and `window - 1` before.
    layer_is_window: tuple[bool, ...]  # One for each layer; False reads all positions.
    tie_embeddings: bool  # The output head is the embedding matrix.
    context: int  # Positions that the model was made for.
    bos_id: int | None
    eos_ids: tuple[int, ...]  # Tokens that end a generation; at least one.

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "context"):
            require_count(field, getattr(self, field))
        require_count("layer_count", self.layer_count, LAYER_COUNT_MAX)
        require_positive("norm_eps", self.norm_eps)
        self.require_each_layer("layer_is_window", self.layer_is_window)
        self._check_window()
        self._check_ids()

    @property
    def has_window_layers(self) -> bool:
        return any(self.layer_is_window)

    def attention_of(self, layer: int) -> AttentionShape:
        """The heads of one layer."""
        raise NotImplementedError

    def kv_owner(self, layer: int) -> int:
        """The layer whose keys and values this one reads: itself, or an earlier one of the same
        reach. Only a layer that is its own owner holds pages.
        """
        return layer

    @property
    def mlp_width(self) -> int:
        """Inner numbers of the widest MLP for a token; of all experts that it is sent to."""
        raise NotImplementedError

    @property
    def carried_width(self) -> int:
        """Numbers of a token that go through all layers beside the residual."""
        return 0

    def read_numbers(self, layer: int) -> int:
        """Numbers of the pages of a layer that one query reads, at most."""
        shape, positions = self.attention_of(layer), self.context
        if self.layer_is_window[layer] and self.window is not None:
            positions = min(self.window, self.context)
        return positions * (shape.key_width + shape.value_width)

    def weight_shapes(self) -> Shapes:
        """The shape of every weight that the model has, by canonical name, in its order.

        Canonical names are those of published Hugging Face folders. Matrices are
        [outputs, inputs] unless the family's folders have them otherwise. The head is there
        only if it is not the embedding matrix.
        """
        raise NotImplementedError

    def gguf_names(self) -> dict[str, str]:
        """The name in a GGUF file of every weight, by canonical name. Raises `CheckpointError`
        for a family that is not read from such files.
        """
        raise CheckpointError(
            f"models of the {self.family} family are not read from GGUF files"
        )

    def gguf_unused(self) -> frozenset[str]:
        """Names of tensors that a GGUF file may hold although the model does not need them."""
        return frozenset()

    def is_float32(self, name: str) -> bool:
        """Whether this weight stays float32, whatever type the others are loaded in."""
        del name
        return False

    def is_integer(self, name: str) -> bool:
        """Whether this weight is a table of whole numbers: it is loaded as int64."""
        del name
        return False

    def canonical_name(self, stored: str) -> str | None:
        """The canonical name of a tensor of a Hugging Face folder. None for one that the model
        does not need, as this family knows; a name that it does not know stays as it is.
        """
        return stored

    def stored_offset(self, name: str) -> float:
        """What a Hugging Face folder leaves out of this weight: it is added on loading."""
        del name
        return 0.0

    def require_each_layer(self, field: str, values: tuple[object, ...]) -> None:
        """Raise `CheckpointError` unless there is one value for each layer."""
        require(
            len(values) == self.layer_count,
            field,
            f"{len(values)} entries",
            f"must have one for each of the {self.layer_count} layers",
        )

    def _check_window(self) -> None:
        if not self.has_window_layers:
            require(self.window is None, "window", self.window, "no layer has a window")
            return
        require(
            self.window is not None and 1 <= self.window <= COUNT_MAX,
            "window",
            self.window,
            f"must be from 1 to {COUNT_MAX}, since some layers have a window",
        )

    def _check_ids(self) -> None:
        right = f"must be a token id from 0 to {self.vocab_size - 1}"
        require(len(self.eos_ids) >= 1, "eos_ids", self.eos_ids, "must name an end token")
        for eos_id in self.eos_ids:
            require(0 <= eos_id < self.vocab_size, "eos_ids", eos_id, right)
        if self.bos_id is not None:
            require(0 <= self.bos_id < self.vocab_size, "bos_id", self.bos_id, right)


def require(holds: bool, field: str, value: object, right: str) -> None:
    """Raise `CheckpointError` unless it holds; `right` says what the field must be."""
    if not holds:
        raise CheckpointError(f"{field} is {value}: {right}")


def require_count(field: str, value: int, count_max: int = COUNT_MAX) -> None:
    require(1 <= value <= count_max, field, value, f"must be from 1 to {count_max}")


def require_positive(field: str, value: float) -> None:
    holds = math.isfinite(value) and value > 0
    require(holds, field, value, "must be a positive number")
