"""`ModelConfig`: the sizes and constants of a model, the same whatever file they came from."""

import math
from typing import Literal

import msgspec

from tidegate.engine.checkpoint.errors import CheckpointError

Family = Literal["llama", "gemma3"]
FAMILIES: tuple[Family, ...] = ("llama", "gemma3")

LAYER_COUNT_MAX = 1024
COUNT_MAX = 2**31 - 1  # Of every other size: far above any model, far below trouble.

_POSITIVE_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "layer_count",
    "head_count",
    "kv_head_count",
    "head_dim",
    "context",
)
_POSITIVE_NUMBERS = ("norm_eps", "rope_theta", "query_scale", "embedding_scale")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's code needs to know besides the weights.

    A value that breaks a rule below raises `CheckpointError`, which names the field, when the
    struct is made. So whoever holds one may rely on them.
    """

    family: Family
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int  # A multiple of `kv_head_count`.
    kv_head_count: int
    head_dim: int  # Even: rotary embeddings turn pairs.
    norm_eps: float
    rope_theta: float  # Rotary base of the full-attention layers.
    rope_theta_window: float | None  # Of the window layers; None if there are none.
    window: int | None  # Tokens a window layer's query reads: itself and `window - 1` before.
    layer_is_window: tuple[bool, ...]  # One for each layer; False is full attention.
    query_scale: float  # What query times key is multiplied with before the softmax.
    embedding_scale: float  # Not rounded; Gemma's code rounds it to the weights' dtype.
    tie_embeddings: bool  # The output head is the embedding matrix.
    context: int  # Positions that the model was made for.
    bos_id: int | None
    eos_ids: tuple[int, ...]  # Tokens that end a generation; at least one.

    def __post_init__(self) -> None:
        for field in _POSITIVE_COUNTS:
            value: int = getattr(self, field)
            count_max = LAYER_COUNT_MAX if field == "layer_count" else COUNT_MAX
            _require(1 <= value <= count_max, field, value, f"must be from 1 to {count_max}")
        for field in _POSITIVE_NUMBERS:
            number: float = getattr(self, field)
            _require(
                math.isfinite(number) and number > 0, field, number, "must be a positive number"
            )
        _require(
            self.head_count % self.kv_head_count == 0,
            "head_count",
            self.head_count,
            f"must be a multiple of kv_head_count, which is {self.kv_head_count}",
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "must be even")
        _require(
            len(self.layer_is_window) == self.layer_count,
            "layer_is_window",
            f"{len(self.layer_is_window)} entries",
            f"must have one for each of the {self.layer_count} layers",
        )
        self._check_window()
        self._check_ids()

    @property
    def has_window_layers(self) -> bool:
        return any(self.layer_is_window)

    def _check_window(self) -> None:
        if not self.has_window_layers:
            _require(self.window is None, "window", self.window, "no layer has a window")
            return
        _require(
            self.window is not None and self.window >= 1,
            "window",
            self.window,
            "must be at least 1, since some layers have a window",
        )
        theta = self.rope_theta_window
        _require(
            theta is not None and math.isfinite(theta) and theta > 0,
            "rope_theta_window",
            theta,
            "must be a positive number, since some layers have a window",
        )

    def _check_ids(self) -> None:
        right = f"must be a token id from 0 to {self.vocab_size - 1}"
        _require(len(self.eos_ids) >= 1, "eos_ids", self.eos_ids, "must name an end token")
        for eos_id in self.eos_ids:
            _require(0 <= eos_id < self.vocab_size, "eos_ids", eos_id, right)
        if self.bos_id is not None:
            _require(0 <= self.bos_id < self.vocab_size, "bos_id", self.bos_id, right)


def _require(holds: bool, field: str, value: object, right: str) -> None:
    if not holds:
        raise CheckpointError(f"{field} is {value}: {right}")
