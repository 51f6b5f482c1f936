"""The rules that a ModelConfig keeps."""

import math
from typing import Any

import pytest

from tidegate.engine.checkpoint.config import ModelConfig
from tidegate.engine.checkpoint.errors import CheckpointError

FIELDS: dict[str, Any] = {
    "family": "gemma3",
    "name": "tiny",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "layer_count": 3,
    "head_count": 4,
    "kv_head_count": 2,
    "head_dim": 16,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_theta_window": 1e4,
    "window": 32,
    "layer_is_window": (True, True, False),
    "query_scale": 0.25,
    "embedding_scale": 8.0,
    "tie_embeddings": True,
    "context": 4096,
    "bos_id": 2,
    "eos_ids": (1,),
}


def make(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = FIELDS | changes
    return ModelConfig(**fields)


def test_a_sound_configuration_is_made() -> None:
    assert make().has_window_layers
    full = make(layer_is_window=(False,) * 3, window=None, rope_theta_window=None)
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
                "head_count",
                "kv_head_count",
                "head_dim",
                "context",
            )
            for value in (0, -1, 2**31)
        ),
        *(
            (field, value)
            for field in ("norm_eps", "rope_theta", "query_scale", "embedding_scale")
            for value in (0.0, -1.0, math.inf, math.nan)
        ),
        ("layer_count", 1025),
        ("head_count", 5),
        ("head_dim", 15),
        ("layer_is_window", (True,)),
        ("window", None),
        ("window", 0),
        ("rope_theta_window", None),
        ("rope_theta_window", math.nan),
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


def test_a_window_that_no_layer_has_is_refused() -> None:
    with pytest.raises(CheckpointError, match="window is 32: no layer has a window"):
        make(layer_is_window=(False,) * 3)
