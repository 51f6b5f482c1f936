"""The rules that a ModelConfig keeps."""

import math
from typing import Any

import pytest

from tidegate.engine.checkpoint.config import AttentionShape
from tidegate.engine.checkpoint.errors import CheckpointError
from tidegate.engine.checkpoint.families.gemma3 import Gemma3Config
from tidegate.engine.checkpoint.rope import Rope

HEADS: dict[str, int] = {"head_count": 4, "kv_head_count": 2, "key_size": 16, "value_size": 16}
FIELDS: dict[str, Any] = {
    "name": "tiny",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "layer_count": 3,
    "attention": AttentionShape(**HEADS),
    "norm_eps": 1e-6,
    "rope": Rope(theta=1e6, size=16),
    "rope_window": Rope(theta=1e4, size=16),
    "window": 32,
    "layer_is_window": (True, True, False),
    "query_scale": 0.25,
    "embedding_scale": 8.0,
    "tie_embeddings": True,
    "context": 4096,
    "bos_id": 2,
    "eos_ids": (1,),
}


def make(**changes: Any) -> Gemma3Config:
    fields: dict[str, Any] = FIELDS | changes
    return Gemma3Config(**fields)


def test_a_sound_configuration_is_made() -> None:
    assert make().has_window_layers
    full = make(layer_is_window=(False,) * 3, window=None, rope_window=None)
    assert not full.has_window_layers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (field, value)
            for field in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "layer_count",
                "context",
            )
            for value in (0, -1, 2**31)
        ),
        *(
            (field, value)
            for field in ("norm_eps", "query_scale", "embedding_scale")
            for value in (0.0, -1.0, math.inf, math.nan)
        ),
        ("layer_count", 1025),
        ("layer_is_window", (True,)),
        ("window", None),
        ("window", 0),
        ("rope_window", None),
        ("bos_id", 100),
        ("bos_id", -1),
        ("eos_ids", ()),
        ("eos_ids", (1, 100)),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_and_its_field_named(
    field: str, value: object
) -> None:
    with pytest.raises(CheckpointError, match=f"^{field} is "):
        make(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in HEADS for value in (0, -1, 2**31)),
        ("head_count", 5),
        ("key_size", 15),
    ],
)
def test_heads_that_cannot_be_right_are_refused(field: str, value: int) -> None:
    with pytest.raises(CheckpointError, match=f"^{field} is "):
        AttentionShape(**(HEADS | {field: value}))


def test_values_may_have_another_size_than_keys() -> None:
    shape = AttentionShape(**(HEADS | {"value_size": 7}))
    widths = (shape.query_width, shape.key_width, shape.value_width, shape.output_width)
    assert widths == (64, 32, 14, 28)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"theta": 0.0, "size": 16}, "rope theta is 0"),
        ({"theta": math.nan, "size": 16}, "rope theta is nan"),
        ({"theta": 1e4, "size": 15}, "rope size is 15: must be even"),
        ({"theta": 1e4, "size": 16, "turning_pairs": 9}, "rope turning_pairs is 9"),
    ],
)
def test_rotations_that_cannot_be_right_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{named}"):
        Rope(**fields)


def test_a_rotation_of_another_size_than_the_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rope size is 8: must be the head size, which"):
        make(rope=Rope(theta=1e6, size=8))


def test_a_window_that_no_layer_has_is_refused() -> None:
    with pytest.raises(CheckpointError, match="window is 32: no layer has a window"):
        make(layer_is_window=(False,) * 3)
